"""Reading far tokens ahead: it saves time or costs some, and never changes an answer."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import kvtailor
from kvtailor.attention import attention_modules
from kvtailor.errors import StoreError
from kvtailor.indexes.selection import choose
from kvtailor.layers.ahead import ReadingAhead, completed
from kvtailor.layers.far import FarTokens
from kvtailor.layers.side_stream import side_stream
from kvtailor.prediction import query_of
from kvtailor.read_ahead import ReadAhead
from zoo import ZOO, causal, kv_cache, text

STEPS = 4
NAMES = ["llama", "qwen3", "gemma2", "phi3", "gpt-neox", "mistral"]

pytestmark = pytest.mark.usefixtures("kernels")


def plan(ahead: bool, select: str = "query") -> kvtailor.Plan:
    find = {"index": "codes", "top": 40, "select": select, "ahead": ahead}
    return kvtailor.Plan(layers=[{"find": find, "tier": "disk"}])


def answers(model, ahead: bool, select: str = "query") -> tuple[torch.Tensor, list]:
    """Logits of greedy steps behind a prompt, and what reading ahead was good for in layers that others precede."""
    ids, found = torch.tensor([[5], [6]]), []
    with kvtailor.attach(model, plan(ahead, select)):
        cache = kv_cache(model(**text(300), use_cache=True))
        for _ in range(STEPS):
            found.append(model(ids, past_key_values=cache).logits)
            ids = found[-1].argmax(-1)
    return torch.cat(found, dim=1), [layer.ahead.stats for layer in cache.tailored() if layer.place.index]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("select", ["query", "mean"])
def test_answers_are_the_same_to_the_bit_with_and_without(name, select):
    model = ZOO[name].build()
    expected, _ = answers(model, ahead=False, select=select)
    found, stats = answers(model, ahead=True, select=select)
    assert torch.equal(found, expected)
    assert stats and all(one.hit > 0 and one.failed == 0 for one in stats)


def test_nothing_is_read_ahead_of_the_first_layer():
    model, step = ZOO["llama"].build(), torch.tensor([[5], [6]])
    with kvtailor.attach(model, plan(ahead=True)):
        cache = kv_cache(model(**text(300), use_cache=True))
        model(step, past_key_values=cache)
    stats = cache.layers[0].ahead.stats
    assert stats.hit == stats.read_seconds == 0 < stats.wanted


def test_slow_reads_are_partly_hidden_and_change_nothing(monkeypatch):
    model = ZOO["llama"].build()
    expected, _ = answers(model, ahead=False)
    rows = FarTokens.rows

    def slow(self, *arguments):
        time.sleep(0.005)
        return rows(self, *arguments)

    monkeypatch.setattr(FarTokens, "rows", slow)
    found, stats = answers(model, ahead=True)
    assert torch.equal(found, expected)
    assert all(one.read_seconds >= 0.005 * STEPS and 0 < one.hit_rate <= 1 for one in stats)
    assert all(0 <= one.hidden <= 1 for one in stats)


def test_the_report_adds_up_what_the_layers_read():
    model = ZOO["llama"].build()
    with kvtailor.attach(model, plan(ahead=True)):
        cache = kv_cache(model(**text(300), use_cache=True))
        model(torch.tensor([[5], [6]]), past_key_values=cache)
    report = cache.report()
    assert report.reads.wanted == sum(layer.ahead.stats.wanted for layer in cache.tailored()) == 3 * 2 * 6 * 40
    assert report.as_dict()["reads"]["hit_rate"] == report.reads.hit / report.reads.wanted
    assert "rows wanted" in str(report) and kvtailor.KVCache(model, "quest").report().reads is None


def test_guesses_that_mean_nothing_cost_time_alone(monkeypatch):
    model = ZOO["llama"].build()
    expected, _ = answers(model, ahead=False)
    source = torch.Generator().manual_seed(0)
    monkeypatch.setattr("kvtailor.read_ahead.query_of", lambda *_: torch.randn(2, 6, 1, 16, generator=source))
    found, stats = answers(model, ahead=True)
    assert torch.equal(found, expected)
    assert all(one.hit < one.wanted for one in stats)


def test_modules_that_cannot_be_asked_are_served_as_without(monkeypatch):
    model = ZOO["llama"].build()
    expected, _ = answers(model, ahead=False)

    def fails(*arguments):
        raise TypeError("unexpected keyword")

    monkeypatch.setattr("kvtailor.read_ahead.query_of", fails)
    found, stats = answers(model, ahead=True)
    assert torch.equal(found, expected) and [one.failed for one in stats] == [STEPS, STEPS]


@pytest.mark.parametrize("spoil", [
    lambda query: query * torch.nan,
    lambda query: query.masked_fill(torch.arange(16) == 3, torch.inf),
    lambda query: query[:1],
    lambda query: query[..., :7],
    lambda query: query.tolist(),
], ids=["nan", "inf", "row", "channels", "list"])  # fmt: skip
def test_guesses_that_are_no_queries_change_nothing(monkeypatch, spoil):
    model = ZOO["llama"].build()
    expected, _ = answers(model, ahead=False)
    monkeypatch.setattr("kvtailor.read_ahead.query_of", lambda *asked: spoil(query_of(*asked)))
    found, _ = answers(model, ahead=True)
    assert torch.equal(found, expected)


def test_a_guess_that_overflows_where_the_model_does_not_changes_nothing():
    """Half precision: the next layer's projections are large, and its input is small, but not the input before it."""
    model = ZOO["llama"].build()
    for layer, factor in zip(model.model.layers, (1000.0, 0.001, 1.0), strict=True):
        layer.input_layernorm.weight.data.mul_(factor)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight.data.div_(factor)
    model.half()
    expected, _ = answers(model, ahead=False)
    found, _ = answers(model, ahead=True)
    assert expected.isfinite().all() and torch.equal(found, expected)


def test_time_of_guesses_counts_as_time_of_reading(monkeypatch):
    """Else what steps wait for would be more than all reading."""

    def slow(*asked):
        time.sleep(0.005)
        return query_of(*asked)

    monkeypatch.setattr("kvtailor.read_ahead.query_of", slow)
    _, stats = answers(ZOO["llama"].build(), ahead=True)
    assert all(one.read_seconds >= 0.005 * STEPS for one in stats)


def test_a_guess_chooses_by_the_layers_own_factor_on_logits(monkeypatch):
    """Probabilities are summed over the heads that share a choice, so the factor matters."""
    model = causal("Gemma2Config", "Gemma2ForCausalLM", query_pre_attn_scalar=64).build()
    used = set()

    def watched(index, query, count, select, scale, path):
        used.add((threading.current_thread().name.startswith("kvtailor-read"), scale))
        return choose(index, query, count, select, scale, path)

    monkeypatch.setattr("kvtailor.layers.retrieving.choose", watched)
    answers(model, ahead=True, select="sum")
    assert used == {(True, 64**-0.5), (False, 64**-0.5)}


def test_rows_read_ahead_are_gone_behind_their_step_and_counted_while_they_are_there():
    model, step = ZOO["llama"].build(), torch.tensor([[5], [6]])
    peaks = []
    for ahead in (False, True):
        with kvtailor.attach(model, plan(ahead)):
            cache = kv_cache(model(**text(300), use_cache=True))
            cache.step.peak = 0
            model(step, past_key_values=cache)
            model(step, past_key_values=cache)
        peaks.append(cache.step.peak)
        assert all(not layer._staged and not layer.ahead.ready for layer in cache.tailored())
    assert peaks[1] - peaks[0] == 2 * 6 * 40 * (2 * 16 * 4 + 8)  # rows, heads, tokens; key, value and number


@pytest.mark.parametrize("change", [
    lambda cache: cache.crop(-100),
    lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    lambda cache: cache.batch_repeat_interleave(2),
    lambda cache: cache.batch_select_indices(torch.tensor([1])),
    lambda cache: cache.reset(),
])  # fmt: skip
def test_rows_read_for_a_step_that_did_not_come_are_counted_and_dropped_where_tokens_change(change):
    """A pass over some of the layers leaves one."""
    model, step = ZOO["llama"].build(), torch.tensor([[5], [6]])
    with kvtailor.attach(model, plan(ahead=True)):
        cache = kv_cache(model(**text(300), use_cache=True))
        last = cache.layers[2]
        held = last.nbytes()
        model.model.config.num_hidden_layers = 2
        model(step, past_key_values=cache)
        wait([last.ahead._pending[0]])
        assert last.nbytes() - held == 2 * 6 * 40 * (2 * 16 * 4 + 8)
        change(cache)
        assert last.ahead.ready == [] and last.ahead._pending is None


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_layer_is_asked_with_its_own_rotation(monkeypatch, name):
    """Gemma 3 rotates full layers by another base than the sliding ones before them."""
    model, guessed, own = ZOO[name].build(), {}, {}
    modules = attention_modules(model.get_decoder())

    def watched(module, args, kwargs):
        guessed[module.layer_idx] = kwargs["position_embeddings"]
        return query_of(module, args, kwargs)

    monkeypatch.setattr("kvtailor.read_ahead.query_of", watched)
    for index, module in modules.items():
        module.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: own.update({index: kwargs["position_embeddings"]}),
            with_kwargs=True,
        )
    _, stats = answers(model, ahead=True)
    assert list(guessed) == [1] and stats[0].failed == 0 < stats[0].hit
    for ours, theirs in zip(guessed[1], own[1], strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_asked_where_the_rotation_is_not_known():
    decoder = ZOO["gemma3"].build().get_decoder()
    reading, hidden = ReadAhead(decoder), torch.zeros(2, 1, 48)
    given = {"position_embeddings": (hidden, hidden), "position_ids": torch.zeros(1, 1, dtype=torch.long)}
    assert reading._rotation(0, 2, hidden, {}) == {}  # both slide
    assert reading._rotation(0, 1, hidden, given).keys() == {"position_embeddings"}
    for name in given:
        assert reading._rotation(0, 1, hidden, {**given, name: None}) is None
    reading.close()


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_decoders_with_cross_attention_are_left_alone(name):
    reading = ReadAhead(ZOO[name].build().get_decoder())
    assert reading._hooks == []
    reading.close()


def test_modules_whose_weights_come_and_go_are_not_asked():
    """As Accelerate marks them: two threads would bring the weights in and take them away."""
    model = ZOO["llama"].build()
    here, there, last = attention_modules(model.get_decoder()).values()
    there.q_proj._hf_hook = SimpleNamespace(offload=False)
    last.q_proj._hf_hook = SimpleNamespace(hooks=[SimpleNamespace(offload=True)])
    reading = ReadAhead(model.get_decoder())
    assert len(here._forward_pre_hooks) == 1 and not there._forward_pre_hooks and not last._forward_pre_hooks
    reading.close()


def test_a_read_that_fails_ahead_is_an_error_at_the_step_and_others_go_on(monkeypatch):
    model, step = ZOO["llama"].build(), torch.tensor([[5], [6]])
    rows = FarTokens.rows
    with kvtailor.attach(model, plan(ahead=True)):
        cache = kv_cache(model(**text(300), use_cache=True))
        other = copy.deepcopy(cache)
        expected = model(step, past_key_values=copy.deepcopy(cache)).logits
        with monkeypatch.context() as patch:

            def fails(self, *arguments):
                if threading.current_thread().name.startswith("kvtailor-read"):
                    raise StoreError("a cache file cannot be read: Input/output error")
                return rows(self, *arguments)

            patch.setattr(FarTokens, "rows", fails)
            with pytest.raises(StoreError, match="Input/output error"):
                model(step, past_key_values=cache)
        assert cache.get_seq_length() == 300
        for one in (other, cache):
            assert torch.equal(model(step, past_key_values=one).logits, expected)


def test_leaving_the_plan_ends_the_thread_and_takes_the_hooks_off():
    model = ZOO["llama"].build()
    before = threading.active_count()
    answers(model, ahead=True)
    assert threading.active_count() == before
    assert all(not module._forward_pre_hooks for module in attention_modules(model.get_decoder()).values())


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_asked_with_its_own_input_makes_its_own_query(name):
    """Fused projections, norms of queries and partial rotations included."""
    model, asked, made = ZOO[name].build(), {}, {}
    for index, module in attention_modules(model.get_decoder()).items():

        def before(module, args, kwargs, index=index):
            if index not in asked:
                asked[index] = None
                given = {name: None if isinstance(value, kvtailor.KVCache) else value for name, value in kwargs.items()}
                asked[index] = query_of(module, args, {**given, "attention_mask": None})

        module.register_forward_pre_hook(before, with_kwargs=True)
    with kvtailor.attach(model, plan(ahead=False)):
        cache = kvtailor.KVCache(model, plan(ahead=False))
        for layer in cache.tailored():
            attend = layer.attend

            def watched(module, query, *rest, layer=layer, attend=attend, **given):
                made[layer.place.index] = query
                return attend(module, query, *rest, **given)

            layer.attend = watched
        model(**text(20), past_key_values=cache)
    assert made and all(torch.equal(asked[index], query) for index, query in made.items())


# Streams: a stand-in for those of a GPU, which notes what it is asked for, by whom and in which order


class FakeCuda:
    """The part of torch.cuda that orders streams; the compute stream is the one that is current everywhere at first."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.events = 0
        self.compute, self.side = FakeStream(self, "compute"), FakeStream(self, "side")
        self._current = threading.local()

    def note(self, *what: str) -> None:
        thread = "reader" if threading.current_thread().name.startswith("kvtailor-read") else "main"
        self.log.append((thread, *what))

    def of(self, thread: str) -> list[tuple[str, ...]]:
        return [tuple(what) for who, *what in self.log if who == thread]

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def Event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, f"event {self.events}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record(self, stream: FakeStream) -> None:
        self.cuda.note("record", self.name, stream.name)


class FakeStream:
    device = torch.device("cpu")

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_event(self) -> FakeEvent:
        event = self.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.note("wait", event.name, self.name)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    """What reading ahead asks of streams, of reads, of tensors that change hands, and of steps that take rows."""
    fake, rows = FakeCuda(), FarTokens.rows
    monkeypatch.setattr("kvtailor.layers.side_stream.torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr("kvtailor.read_ahead.side_stream", lambda device: fake.side)

    def noted_rows(self, *arguments):
        fake.note("read", fake.current_stream().name)
        return rows(self, *arguments)

    def noted_completed(far, index, staged, stats):
        for tensor in staged.tensors if staged else ():
            fake.note("use", str(id(tensor)), fake.current_stream().name)
        return completed(far, index, staged, stats)

    monkeypatch.setattr(FarTokens, "rows", noted_rows)
    monkeypatch.setattr("kvtailor.layers.retrieving.completed", noted_completed)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: fake.note("keep", str(id(self)), stream.name)
    )
    return fake


def test_a_stream_of_its_own_reads_after_what_was_asked_before_and_ahead_of_what_uses_it(monkeypatch, cuda):
    """Layers 1 and 2 of three, two sequences: each a wait before the reads, and one before the use of what was read."""
    model = ZOO["llama"].build()
    with monkeypatch.context() as patch:
        patch.setattr("kvtailor.read_ahead.side_stream", lambda device: None)
        expected, _ = answers(model, ahead=True)
    assert {what for _, what, *_ in cuda.log} == {"read", "use"}  # on the CPU no stream is asked for anything
    cuda.log.clear()
    found, _ = answers(model, ahead=True)
    assert torch.equal(found, expected)
    read, events = ("read", "side"), [f"event {number + 1}" for number in range(4 * STEPS)]
    reader, main = cuda.of("reader"), [what for what in cuda.of("main") if what[0] != "read"]
    for ready, done in zip(events[::2], events[1::2], strict=True):
        assert reader[:4] == [("wait", ready, "side"), read, read, ("record", done, "side")]
        del reader[:4]
        waited = main.index(("wait", done, "compute"))
        assert main.index(("record", ready, "compute")) < waited
        kept, used = main[waited + 1 : waited + 7], main[waited + 7 : waited + 13]
        assert kept == [("keep", *rest) for _, *rest in used] and {what for what, *_ in used} == {"use"}
        assert {stream for *_, stream in kept} == {"compute"} and len({name for _, name, _ in kept}) == 6
        both = [cuda.log.index(("reader", "record", done, "side")), cuda.log.index(("main", "wait", done, "compute"))]
        assert both == sorted(both)
    assert reader == []


def test_a_read_that_fails_in_a_stream_is_waited_for_before_the_error(monkeypatch, cuda):
    model, step = ZOO["llama"].build(), torch.tensor([[5], [6]])
    with kvtailor.attach(model, plan(ahead=True)):
        cache = kv_cache(model(**text(300), use_cache=True))

        def fails(self, *arguments):
            raise StoreError("a cache file cannot be read: Input/output error")

        monkeypatch.setattr("kvtailor.layers.retrieving.read", fails)
        with pytest.raises(StoreError, match="Input/output error"):
            model(step, past_key_values=cache)
    assert cuda.of("reader")[:2] == [("wait", "event 1", "side"), ("record", "event 2", "side")]
    main = [what for what in cuda.of("main") if what[0] != "read"]
    assert ("wait", "event 2", "compute") in main and not {"keep", "use"} & {what for what, *_ in main}


def test_what_a_guess_reads_lives_until_the_step_has_waited_for_it():
    """The other thread may be through with it long before a GPU is."""
    hidden, ahead = torch.zeros(1), ReadingAhead()
    alive = weakref.ref(hidden)
    with ThreadPoolExecutor(max_workers=1) as executor:
        ahead.begin(executor, lambda hidden=hidden: [None] * len(hidden), side_stream(torch.device("cpu")))
        del hidden
        wait([ahead._pending[0]])
        executor.submit(int).result()  # the thread holds its last job no longer
        assert alive() is not None
        assert ahead.take() == [None] and alive() is None
