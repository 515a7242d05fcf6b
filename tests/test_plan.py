"""Plans: read, written, refused with the field, what it held and what is allowed."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import kvtailor
from kvtailor import Plan, PlanError
from kvtailor.budget import Budget
from kvtailor.presets import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_survives_being_written_and_read(name, tmp_path):
    plan = Plan.preset(name)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert Plan.of(str(tmp_path / "plan.yaml")) == plan and Plan.of(plan) is plan and Plan.of(name) == plan


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("snapkv:512", Budget("tokens", 512)),
        ("h2o:25%", Budget("fraction", 0.25)),
        ("fifo:64MiB", Budget("bytes", 2**26)),
        ("lru", Budget("fraction", 0.25)),
    ],
)
def test_a_preset_takes_its_budget_after_a_colon(name, budget):
    assert Plan.preset(name).layers[0].keep.budget == budget


@given(
    st.one_of(
        st.integers(1, 10**9),
        st.integers(1, 100).map(lambda n: f"{n}%"),
        st.tuples(st.integers(1, 10**6), st.sampled_from(["B", "KiB", "MiB", "GiB", "kB", "MB", "GB"])).map(
            lambda p: f"{p[0]}{p[1]}"
        ),
        st.floats(1e-6, 1.0),
    )
)
def test_budgets_survive_being_written_and_read(text):
    budget = Budget.parse(text)
    again = Budget.parse(int(str(budget)) if budget.kind == "tokens" else str(budget))
    assert again.kind == budget.kind and again.amount == pytest.approx(budget.amount, rel=1e-9)


def test_the_first_entry_that_addresses_a_layer_decides():
    plan = Plan(
        layers=[
            {"layers": "0-1,-1", "form": {"kind": "rotated", "bits": 8}},
            {"layers": [2], "keep": {"policy": "fifo", "budget": 9}},
        ]
    )
    kinds = [(plan.layer(n, 5).form.kind, plan.layer(n, 5).keep.policy) for n in range(5)]
    assert kinds == [("rotated", "all"), ("rotated", "all"), ("dense", "fifo"), ("dense", "all"), ("rotated", "all")]
    assert plan.layer(0, 5, "cross").is_full


def test_the_schema_is_json_and_names_the_four_choices():
    schema = json.loads(json.dumps(Plan.model_json_schema()))
    assert {"keep", "form", "find", "tier"} <= set(schema["$defs"]["LayerPlan"]["properties"])


def test_tailorkv_settings_are_a_plan(tmp_path):
    """The file that TailorKV is described with: packed layers, and channels that find the tokens of the others."""
    file = tmp_path / "settings.yaml"
    file.write_text(
        "quant_layers: [0, 3]\nsparse_ratio: 0.03\ncritical_channels: 12\nprefetch_window: 2\ntau: 0.2\nbits: 2\n"
    )
    plan = Plan.load(file)
    packed, found = plan.layer(3, 5), plan.layer(1, 5)
    assert (packed.form.kind, packed.form.bits, packed.find.index) == ("channel", 2, "all")
    assert (found.find.index, found.find.options, str(found.find.top)) == ("channels", {"count": 12}, "3%")
    assert found.find.ahead and found.tier == "host" and Plan.of(file).layer(4, 5) == found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_layers": 0}, "quant_layers 0 cannot be used: allowed is a list"),
        ({"quant_layers": [0], "sparse_ratio": 3}, "sparse_ratio 3 cannot be used"),
        ({"quant_layers": [0], "prefetch_window": 5}, "prefetch_window 5 cannot be used"),
        ({"quant_layers": [0], "critical_channels": 0}, "critical_channels 0 cannot be used: allowed are 1 to 256"),
        ({"quant_layers": [0], "critical_channels": 300}, "critical_channels 300 cannot be used"),
        ({"quant_layers": [0], "critical_channels": "eight"}, "critical_channels 'eight' cannot be used"),
        ({"quant_layers": [0], "bits": 5}, "json: bits 5 cannot be used: allowed are 1, 2, 3, 4, 8"),
        ({"quant_layers": [], "bits": 5}, "json: bits 5 cannot be used"),
        ({"quant_layers": [0], "bits": True}, "json: bits True cannot be used"),
        ({"quant_layers": [], "tau": "many"}, "tau 'many' cannot be used: allowed are densities from 0 to 1"),
        ({"sparse_ratio": 0.03, "tau": 0.2}, "quant_layers is missing beside sparse_ratio, tau: allowed is a list"),
        ({"quant_layers": [0], "channels": 8}, "field 'channels' is not known beside quant_layers"),
    ],
)
def test_wrong_tailorkv_settings_are_named_with_the_file(tmp_path, settings, said):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    with pytest.raises(PlanError) as caught:
        Plan.load(file)
    assert str(file) in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("listed", [[0, 99], [-4], [3]])
def test_listed_layers_that_the_model_does_not_have_are_named(tmp_path, listed):
    from zoo import ZOO

    model, file = ZOO["llama"].build(), tmp_path / "settings.json"
    file.write_text(json.dumps({"quant_layers": listed}))
    with pytest.raises(PlanError, match=rf"lists layer {listed[-1]}, .* LlamaForCausalLM of 3 layers.* are -3 to 2"):
        kvtailor.attach(model, file)
    for within in ([0, -1], [-3, 2], []):
        file.write_text(json.dumps({"quant_layers": within}))
        kvtailor.attach(model, file).detach()


@pytest.mark.parametrize("name", ["quest", "pqcache:10%", "tailor", "tailor-1bit", "tailor-offload:256"])
def test_presets_that_retrieve_take_the_tokens_of_a_step(name):
    plan = Plan.preset(name)
    first, rest = plan.layer(0, 30), plan.layer(7, 30)
    assert str(rest.find.top) == (name.partition(":")[2] or "512") and rest.find.index != "all"
    assert (first.form.kind != "dense") == name.startswith("tailor")
    assert Plan(**yaml.safe_load(plan.to_yaml())) == plan


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keep": {"policy": "lfu", "budget": 9}}, ["layers[0].keep.policy", "'lfu'", "allowed are all, fifo"]),
        ({"keep": {"policy": "fifo", "budget": 0}}, ["layers[0].keep.budget", "budget 0 cannot be used", "above 0"]),
        ({"keep": {"policy": "fifo", "budget": -5}}, ["layers[0].keep.budget", "budget -5", "above 0"]),
        ({"keep": {"policy": "fifo", "budget": "-1MiB"}}, ["budget '-1MiB'", "above 0"]),
        ({"keep": {"policy": "fifo", "budget": "120%"}}, ["budget '120%'", "up to 100%"]),
        ({"keep": {"policy": "fifo", "budget": "many"}}, ["budget 'many'", "a number of tokens"]),
        ({"keep": {"policy": "fifo"}}, ["layers[0].keep", "'fifo' needs a budget"]),
        ({"keep": {"policy": "all", "budget": 9}}, ["budget 9 needs an eviction policy"]),
        ({"keep": {"policy": "fifo", "budget": 4}}, ["budget 4 is below the protected tokens", "allowed is 5 or more"]),
        ({"keep": {"policy": "snapkv", "budget": 30}}, ["budget 30 is below the protected tokens: 4 sinks and 32 recent", "37 or more"]),
        ({"keep": {"policy": "fifo", "budget": 9, "sinks": -1}}, ["layers[0].keep.sinks", "it held -1"]),
        ({"keep": {"policy": "snapkv", "budget": 99, "options": {"windows": 4}}}, ["no option 'windows'", "allowed are window, kernel"]),
        ({"keep": {"policy": "snapkv", "budget": 99, "options": {"kernel": 4}}}, ["kernel 4", "odd numbers"]),
        ({"keep": {"policy": "snapkv", "budget": 99, "options": {"window": 0}}}, ["window 0", "whole numbers from 1"]),
        ({"keep": {"policy": "streaming", "budget": 9, "options": {"positions": "new"}}}, ["positions 'new'", "renumbered, original"]),
        ({"form": {"kind": "rotated", "bits": 5}}, ["layers[0].form.bits", "5 bits are not offered", "1, 2, 3, 4 and 8"]),
        ({"form": {"kind": "rotated", "bits": True}}, ["layers[0].form.bits", "True bits are not offered"]),
        ({"form": {"kind": "rotated"}}, ["layers[0].form", "needs bits"]),
        ({"form": {"kind": "packed", "bits": 4}}, ["layers[0].form.kind", "'packed'"]),
        ({"form": {"kind": "rotated", "bits": 4, "group": 48}}, ["group 48", "powers of two"]),
        ({"form": {"kind": "channel", "bits": 4, "group": 16}}, ["group 16", "32 and 64"]),
        ({"form": {"kind": "rotated", "bits": 4, "levels": "centroid"}}, ["'centroid' are for 1 bit", "bits is 4"]),
        ({"form": {"kind": "rotated", "bits": 4, "outliers": 2}}, ["outliers 2 need kind 'channel'"]),
        ({"form": {"bits": 4}}, ["bits 4 need kind"]),
        ({"form": {"kind": "rotated", "bits": 4, "residual": -1}}, ["layers[0].form.residual", "-1"]),
        ({"layers": "first"}, ["layers[0].layers", "'first' cannot be read", "0-3,8,-1"]),
        ({"layers": "5-3"}, ["layers[0].layers", "ends before it begins", "allowed is 3-5"]),
        ({"layers": []}, ["layers[0].layers", "names nothing"]),
        ({"attention": "both ways"}, ["layers[0].attention", "'both ways'"]),
        ({"keeps": {}}, ["layers[0].keeps"]),
        ({"tier": "disk"}, ["layers[0]", "tier 'disk' needs an index"]),
        ({"tier": "tape"}, ["layers[0].tier", "'tape'"]),
        ({"find": "tree"}, ["layers[0].find", "unknown index 'tree'", "all, codes, channels, pq, pages"]),
        ({"find": {"index": "codes", "top": 0}}, ["layers[0].find.top: top 0 cannot", "or a fraction of those in slow memory"]),
        ({"find": {"index": "codes", "top": "0%"}}, ["layers[0].find.top: top '0%' cannot be used"]),
        ({"find": {"index": "codes", "top": 1.5}}, ["layers[0].find.top: top 1.5 cannot be used"]),
        ({"find": {"index": "codes", "top": "1MiB"}}, ["top '1MiB' cannot be used", "a number of tokens (512) or a fraction"]),
        ({"find": {"index": "codes", "recent": 0}}, ["layers[0].find.recent", "it held 0"]),
        ({"find": {"index": "codes", "options": {"bit": 2}}}, ["no option 'bit'", "allowed are bits, kind"]),
        ({"find": {"index": "codes", "options": {"bits": 5}}}, ["bits 5 is not offered", "1, 2, 3, 4, 8"]),
        ({"find": {"index": "channels", "options": {"count": 0}}}, ["count 0 cannot be used", "1 to 256"]),
        ({"find": {"index": "pq", "options": {"bits": 9}}}, ["bits 9 cannot be used", "1 to 8"]),
        ({"find": {"index": "pages", "options": {"page": 10}}}, ["page 10 is not offered", "8, 16, 32, 64"]),
        ({"find": {"options": {"bits": 2}}}, ["need an index"]),
        ({"find": "codes", "form": {"kind": "rotated", "bits": 4}}, ["goes with keep 'all' and form 'dense'"]),
        ({"find": "codes", "folder": "there"}, ["folder 'there' needs tier 'disk'"]),
        ({"find": "codes", "tier": "disk", "folder": "a\0b"}, ["layers[0].folder", r"'a\x00b' cannot be used", "null character"]),
        ({"keep": {"policy": "adakv", "budget": 99}, "form": {"kind": "rotated", "bits": 4}}, ["'adakv' gives each head its own budget"]),
        ({"keep": {"policy": "streaming", "budget": 99}, "form": {"kind": "rotated", "bits": 4}}, ["set positions: original"]),
    ],
)  # fmt: skip
def test_a_wrong_plan_says_which_field_what_it_held_and_what_is_allowed(fields, said):
    with pytest.raises(PlanError) as caught:
        Plan(layers=[fields])
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int5", "unknown preset 'int5': allowed are full, int8"),
        ("int4:512", "int4 takes no budget"),
        ("snapkv:0", "budget '0' cannot be used"),
        ("snapkv:", "budget '' cannot be used"),
        ("fifo:-3", "budget '-3' cannot be used"),
        ("fifo:3", "below the protected tokens"),
        ("", "unknown preset ''"),
    ],
)
def test_a_wrong_preset_says_so(name, said):
    with pytest.raises(PlanError, match=said):
        Plan.preset(name)


def test_plan_files_that_cannot_be_used(tmp_path):
    missing, broken, listed, wrong = (tmp_path / f"{n}.yaml" for n in ("missing", "broken", "listed", "wrong"))
    broken.write_text("layers: [")
    listed.write_text("- a\n- b\n")
    wrong.write_text("layers:\n- form: {kind: rotated, bits: 7}\n")
    for path, said in (
        (missing, "cannot be read"),
        (broken, "is not YAML"),
        (listed, "holds list"),
        (wrong, "7 bits are not offered"),
    ):
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value) and said in str(caught.value)
    with pytest.raises(PlanError, match="a Plan, a preset's name and a plan file"):
        Plan.of(5)


def test_formats_that_do_not_fit_the_model_are_refused_at_attach():
    from zoo import ZOO

    model = ZOO["llama"].build()  # heads of 16 channels
    for form, said in (
        ({"group": 32}, "group"),
        ({"kind": "channel", "outliers": 16}, "outliers 16 cannot be used: the head has 16"),
    ):
        plan = Plan(layers=[{"form": {"kind": "rotated", "bits": 4, **form}}])
        with pytest.raises(PlanError, match=said):
            kvtailor.attach(model, plan)


def test_a_budget_in_bytes_below_the_protected_tokens_names_what_would_do():
    from zoo import ZOO, text

    model = ZOO["llama"].build()
    with (
        kvtailor.attach(model, "fifo:1KiB"),
        pytest.raises(PlanError, match=r"budget 1KiB holds \d+ tokens per head in 3 layers.*or more"),
    ):
        model.generate(**text(20), max_new_tokens=2)
