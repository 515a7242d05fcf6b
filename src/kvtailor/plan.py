"""What to do with each layer's KV: four independent choices per layer, as data that can be written down.

``keep`` says which tokens stay, ``form`` how their numbers are stored, ``find`` which of them a query reads, and
``tier`` where they live.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvtailor import presets, tailor_settings
from kvtailor.budget import ALLOWED as ALLOWED_BUDGETS
from kvtailor.budget import Budget
from kvtailor.errors import PlanError
from kvtailor.identity import describe
from kvtailor.indexes.registry import INDEX_NAMES, index_class
from kvtailor.policies.registry import POLICY_NAMES, policy_class

BudgetField = Annotated[
    Budget,
    BeforeValidator(Budget.parse),
    PlainSerializer(str),
    WithJsonSchema(
        {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "string"}], "description": ALLOWED_BUDGETS}
    ),
]

ALLOWED_TOPS = "a number of tokens (512) or a fraction of those in slow memory (5% or 0.05), above 0"


def _read_top(given: object) -> Budget:
    try:
        budget = Budget.parse(given)
    except ValueError:
        budget = None
    if budget is None or budget.kind == "bytes":
        shown = str(given) if isinstance(given, Budget) else repr(given)
        raise ValueError(f"top {shown} cannot be used: allowed is {ALLOWED_TOPS}")
    return budget


TopField = Annotated[
    Budget,
    BeforeValidator(_read_top),
    PlainSerializer(str),
    WithJsonSchema(
        {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "string"}], "description": ALLOWED_TOPS}
    ),
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Keep(_Part):
    """Which tokens stay: ``policy`` "all", or an eviction policy with its budget and protected tokens."""

    policy: str = "all"
    budget: BudgetField | None = None
    sinks: int = Field(4, ge=0, description="first tokens of a sequence that are never evicted")
    recent: int = Field(0, ge=0, description="newest tokens that are never evicted; some policies ask for more")
    hard: bool | None = Field(None, description="hold the budget at every moment; default: budgets in bytes are hard")
    options: dict[str, Any] = Field(default_factory=dict, description="settings of the policy")

    @field_validator("policy")
    @classmethod
    def _known(cls, name: str) -> str:
        if name != "all" and name not in POLICY_NAMES:
            raise ValueError(f"unknown policy {name!r}: allowed are all, {', '.join(POLICY_NAMES)}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> Keep:
        if self.policy == "all":
            if self.budget is not None:
                raise ValueError(f"budget {self.budget} needs an eviction policy, and policy is 'all'")
            return self
        if self.budget is None:
            raise ValueError(f"policy {self.policy!r} needs a budget: {ALLOWED_BUDGETS}")
        policy = policy_class(self.policy).from_options(self.options)
        protected = self.sinks + max(self.recent, policy.recent)
        if self.budget.kind == "tokens" and self.budget.amount <= protected:
            raise ValueError(
                f"budget {self.budget} is below the protected tokens: {self.sinks} sinks and "
                f"{max(self.recent, policy.recent)} recent ones; allowed is {protected + 1} or more"
            )
        return self

    @property
    def is_hard(self) -> bool:
        """Whether the budget holds at every moment, prefill included."""
        if self.budget is None:
            return False
        return self.budget.kind == "bytes" if self.hard is None else self.hard


class Form(_Part):
    """How numbers are stored.

    ``dense`` keeps the model's dtype. ``rotated`` packs each token after a Hadamard rotation of the head. ``channel``
    packs keys per channel over groups of tokens and values per token (KIVI's form).
    """

    kind: Literal["dense", "rotated", "channel"] = "dense"
    bits: Literal[1, 2, 3, 4, 8] | None = None
    levels: Literal["minmax", "centroid", "fit"] | None = None
    group: int | None = Field(
        None, description="numbers that share a scale; default: the largest that divides the head"
    )
    residual: int = Field(64, ge=0, description="newest tokens kept exact")
    exact: int = Field(64, ge=0, description="first tokens kept exact")
    outliers: int = Field(0, ge=0, description="channels of widest range kept exact, per KV head (form channel)")
    precision: Literal["exact", "default", "fast"] = Field(
        "default", description="of attention on codes in the compiled kernels: bits of queries and weights"
    )

    @field_validator("bits", mode="before")
    @classmethod
    def _offered(cls, bits: Any) -> Any:
        if bits is not None and (isinstance(bits, bool) or bits not in (1, 2, 3, 4, 8)):
            raise ValueError(f"{bits!r} bits are not offered: allowed are 1, 2, 3, 4 and 8")
        return bits

    @model_validator(mode="after")
    def _complete(self) -> Form:
        if self.kind == "dense":
            if self.bits is not None:
                raise ValueError(f"bits {self.bits} need kind 'rotated' or 'channel', and kind is 'dense'")
            return self
        if self.bits is None:
            raise ValueError(f"kind {self.kind!r} needs bits: allowed are 1, 2, 3, 4 and 8")
        if self.levels == "centroid" and self.bits != 1:
            raise ValueError(f"levels 'centroid' are for 1 bit, and bits is {self.bits}")
        if self.outliers and self.kind != "channel":
            raise ValueError(f"outliers {self.outliers} need kind 'channel', and kind is {self.kind!r}")
        if self.group is not None and (self.group < 4 or self.group & (self.group - 1)):
            raise ValueError(f"group {self.group} cannot be used: allowed are powers of two from 4")
        if self.kind == "channel" and self.group not in (None, 32, 64):
            raise ValueError(f"group {self.group} cannot be used with kind 'channel': allowed are 32 and 64")
        return self

    @property
    def resolved_levels(self) -> Literal["minmax", "centroid", "fit"]:
        """The levels asked for, or the form's default."""
        if self.levels is not None:
            return self.levels
        if self.bits == 1:
            return "centroid"
        return "fit" if self.kind == "rotated" else "minmax"


class Find(_Part):
    """Which tokens a decode step reads: ``index`` "all", or besides the first and newest those that an index finds.

    Tokens behind an index live in slow memory, see ``tier``.
    """

    index: str = "all"
    top: TopField = Field(
        Budget("tokens", 512), description="tokens read back at each step, or a fraction of those in slow memory"
    )
    select: Literal["query", "mean", "max", "sum"] = Field(
        "query",
        description="query: each query head reads tokens of its own; else the query heads of a KV head share them, by "
        "the mean of their queries, the greatest of their scores, or the sum of their probabilities",
    )
    sinks: int = Field(8, ge=0, description="first tokens that stay in fast memory")
    recent: int = Field(64, ge=1, description="newest tokens that stay in fast memory")
    ahead: bool | None = Field(
        None, description="read tokens ahead of the step that needs them, by a guess at its query; default: from disk"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="settings of the index")

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, given: Any) -> Any:
        return {"index": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _fits(self) -> Find:
        if self.index != "all":
            if self.index not in INDEX_NAMES:
                raise ValueError(f"unknown index {self.index!r}: allowed are all, {', '.join(INDEX_NAMES)}")
            index_class(self.index).from_options(self.options)
        elif self.options:
            raise ValueError(f"options {self.options} need an index, and index is 'all'")
        return self

    def tokens(self, far: int) -> int:
        """Tokens that a step reads back of ``far`` ones, one or more."""
        return max(1, min(far, self.top.tokens(far, 1)))


class LayerPlan(_Part):
    """What to do with the layers that ``layers`` and ``attention`` name."""

    layers: str | int | list[int] = Field("*", description='"*", a number, a list, or a pattern such as "0-3,8,-1"')
    heads: str | int | list[int] = Field("*", description="KV heads, written as layers are")
    attention: Literal["self", "cross", "both"] = "self"
    keep: Keep = Keep()
    form: Form = Form()
    find: Find = Find()
    tier: Literal["device", "host", "disk"] = Field(
        "device", description="where tokens behind an index live: host memory (device, host) or files (disk)"
    )
    prompt_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the blocks before it that a prompt's block of 128 tokens attends to, "
        "besides the first and the newest two; 1 for all",
    )
    folder: str | None = Field(None, description="of files on disk; default: the system's temporary folder")

    @field_validator("layers", "heads")
    @classmethod
    def _readable(cls, layers: str | int | list[int]) -> str | int | list[int]:
        _numbers(layers, 10**6)
        return layers

    @field_validator("folder")
    @classmethod
    def _path(cls, folder: str | None) -> str | None:
        if folder is not None and "\0" in folder:
            raise ValueError(f"folder {folder!r} cannot be used: allowed is a path, and no path holds a null character")
        return folder

    @model_validator(mode="after")
    def _combine(self) -> LayerPlan:
        if self.find.index == "all" and self.tier != "device":
            raise ValueError(f"tier {self.tier!r} needs an index to find tokens by, and find is 'all'")
        if self.find.index != "all" and (self.keep.policy != "all" or self.form.kind != "dense"):
            raise ValueError(f"index {self.find.index!r} goes with keep 'all' and form 'dense'")
        if self.folder is not None and self.tier != "disk":
            raise ValueError(f"folder {self.folder!r} needs tier 'disk', and tier is {self.tier!r}")
        if self.form.kind != "dense" and self.keep.policy != "all":
            if policy_class(self.keep.policy).ragged:
                raise ValueError(
                    f"policy {self.keep.policy!r} gives each head its own budget, and packed layers drop whole groups "
                    "for all heads together: use form 'dense', or another policy"
                )
            if self.keep.policy == "streaming" and self.keep.options.get("positions", "renumbered") == "renumbered":
                raise ValueError("policy 'streaming' renumbers exact keys: with a packed form set positions: original")
            budget = self.keep.budget
            if budget is not None and budget.kind == "tokens" and budget.amount <= self.undroppable:
                raise ValueError(
                    f"budget {budget} is below what stays exact or is about to be packed: {self.form.exact} first "
                    f"tokens, {self.form.residual} newest ones and up to two blocks of 64; "
                    f"allowed is {self.undroppable + 1} or more"
                )
        return self

    @property
    def undroppable(self) -> int:
        """Tokens that a packed layer always holds: the exact ones, an open block, and one coming in."""
        return 0 if self.form.kind == "dense" else self.form.exact + self.form.residual + 2 * 64

    @property
    def reads_ahead(self) -> bool:
        """Whether far tokens are read ahead of the step that needs them."""
        return self.find.index != "all" and (self.tier == "disk" if self.find.ahead is None else self.find.ahead)

    @property
    def names_heads(self) -> bool:
        """Whether this entry speaks of some heads of its layers."""
        return self.heads != "*"

    def addresses(self, layer: int, depth: int, attention: str) -> bool:
        """Whether this entry speaks of a layer, or of some of its heads.

        Parameters
        ----------
        layer : index of the layer in its cache.
        depth : number of layers of that cache.
        attention : "self" or "cross".
        """
        return self.attention in (attention, "both") and layer in _numbers(self.layers, depth)

    @property
    def in_words(self) -> str:
        """How a layer is kept, for people: "snapkv 25%, rotated 4-bit"."""
        words = []
        if self.keep.policy != "all":
            words.append(f"{self.keep.policy} {self.keep.budget}")
        if self.form.kind != "dense":
            words.append(f"{self.form.kind} {self.form.bits}-bit")
        if self.find.index != "all":
            words.append(f"top {self.find.top} by {self.find.index}{', on disk' if self.tier == 'disk' else ''}")
        if self.prompt_share < 1:
            words.append(f"{self.prompt_share:.0%} of prompts")
        return ", ".join(words) or "full"

    @property
    def is_full(self) -> bool:
        """Whether the layer is kept whole and exact."""
        return self.holds_everything and self.prompt_share == 1

    @property
    def holds_everything(self) -> bool:
        """Whether every token stays in fast memory as it came."""
        return self.keep.policy == "all" and self.form.kind == "dense" and self.find.index == "all"


def heads_in_words(parts: Iterable[tuple[Sequence[int], str]]) -> str:
    """How each group of KV heads is kept, for people: "heads 0,2: rotated 4-bit; heads 1: full"."""
    return "; ".join(f"heads {','.join(map(str, heads))}: {words}" for heads, words in parts)


def _numbers(layers: str | int | list[int], depth: int) -> set[int]:
    if layers == [] or isinstance(layers, bool):
        raise ValueError(f'{layers!r} names nothing: allowed are "*", numbers and ranges such as "0-3,8,-1"')
    if isinstance(layers, int):
        layers = [layers]
    if isinstance(layers, list):
        return {n % depth for n in layers if -depth <= n < depth}
    if layers.strip() == "*":
        return set(range(depth))
    numbers: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(-?\d+)\s*(?:-\s*(-?\d+)\s*)?", part)
        if match is None:
            raise ValueError(f'{layers!r} cannot be read: allowed are "*", numbers and ranges such as "0-3,8,-1"')
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if first >= 0 and 0 <= last < first:
            raise ValueError(f"{layers!r} holds a range that ends before it begins: allowed is {last}-{first}")
        first, last = (n + depth if n < 0 else n for n in (first, last))
        numbers.update(range(max(first, 0), min(last, depth - 1) + 1))
    return numbers


class MadeFor(_Part):
    """The model that a plan was calibrated on."""

    model: str = Field(description="class of the model")
    layers: int = Field(ge=1, description="layers of its cache")
    kv_heads: int | None = None
    head_dim: int | None = None
    config: str | None = Field(None, description="hash of what decides the shapes of its layers")
    name: str | None = Field(None, description="what was loaded")
    date: str | None = Field(None, description="when the plan was made, as 2026-11-29")

    def differs(self, identity: dict[str, Any]) -> bool:
        """Whether a model of another identity (see :func:`kvtailor.identity.identity_of`) is meant."""
        fields = ("layers", "kv_heads", "head_dim", "config")
        return any(getattr(self, name) not in (None, identity[name]) for name in fields)


class Plan(_Part):
    """How each layer of a model keeps its keys and values. The first entry that addresses a layer (or head) decides."""

    name: str = "plan"
    layers: list[LayerPlan] = Field(default_factory=list, description="layers that no entry names are kept whole")
    prefill_chunk: int | None = Field(
        None, ge=1, description="tokens per forward pass of a prompt; default: all, or what a hard budget allows"
    )

    made_for: MadeFor | None = Field(None, description="the model that the plan serves; default: any")
    measured: dict[str, Any] = Field(default_factory=dict, description="what calibration found, for the reader")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise PlanError(_explain(error)) from None

    def check_model(self, identity: dict[str, Any]) -> None:
        """Raise PlanError if the plan was made for another model, or lists layers that the model does not have.

        Parameters
        ----------
        identity : as :func:`kvtailor.identity.identity_of` gives it.
        """
        if self.made_for is not None and self.made_for.differs(identity):
            raise PlanError(
                f"plan {self.name!r} was made for {describe(self.made_for.model_dump())}, and this model is "
                f"{describe(identity)}: allowed is a plan made for this model, or one without made_for"
            )
        depth = identity["layers"]
        listed = [number for entry in self.layers if isinstance(entry.layers, list) for number in entry.layers]
        beyond = [number for number in listed if not -depth <= number < depth]
        if beyond:
            raise PlanError(
                f"plan {self.name!r} lists layer {beyond[0]}, and this model is {describe(identity)}: "
                f"allowed are {-depth} to {depth - 1}"
            )

    def layer(self, layer: int, depth: int, attention: str = "self") -> LayerPlan:
        """The entry that decides for a layer, or a full one."""
        return self.parts(layer, depth, attention, None)[0][1]

    def parts(
        self, layer: int, depth: int, attention: str, heads: int | None
    ) -> list[tuple[tuple[int, ...], LayerPlan]]:
        """The KV heads of a layer, and the entry that decides for them: one pair where it decides for all.

        Parameters
        ----------
        layer, depth, attention : as for :meth:`LayerPlan.addresses`.
        heads : KV heads of the layer, or None where they are not known.

        Raises
        ------
        PlanError
            If an entry names heads and their number is not known.
        """
        rest = LayerPlan(attention="cross" if attention == "cross" else "self")
        own = [entry for entry in self.layers if entry.addresses(layer, depth, attention)]
        if not own or not own[0].names_heads:
            return [(tuple(range(heads or 0)), own[0] if own else rest)]
        if heads is None:
            raise PlanError(
                f"plan {self.name!r} names heads of layer {layer}, and the model does not tell how many it has: "
                'allowed is heads "*"'
            )
        deciding: dict[int, tuple[LayerPlan, list[int]]] = {}
        for head in range(heads):
            entry = next((one for one in own if head in _numbers(one.heads, heads)), rest)
            deciding.setdefault(id(entry), (entry, []))[1].append(head)
        return [(tuple(some), entry) for entry, some in deciding.values()]

    @classmethod
    def preset(cls, name: str) -> Plan:
        """A plan by name, with its budget after a colon: ``"int4"``, ``"snapkv:25%"``, ``"h2o:64MiB"``.

        Raises
        ------
        PlanError
            For an unknown name, a budget that cannot be read, or a budget where none belongs.
        """
        return cls(**presets.fields(name))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan, or TailorKV's settings, from a YAML (or JSON) file.

        Raises
        ------
        PlanError
            For a file that cannot be read or used; names the file and the field.
        """
        path = Path(path)
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"plan file {path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise PlanError(f"plan file {path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise PlanError(
                f"plan file {path} holds {type(data).__name__}, allowed is a mapping with the fields of a plan"
            )
        try:
            return cls(**(tailor_settings.plan_fields(data) if tailor_settings.is_settings(data) else data))
        except PlanError as error:
            raise PlanError(f"plan file {path}: {error}") from None
        except TypeError:
            raise PlanError(f"plan file {path}: field names must be text") from None

    @classmethod
    def of(cls, plan: Plan | str | Path) -> Plan:
        """A plan from itself, a preset's name, or the path of a plan file."""
        if isinstance(plan, Plan):
            return plan
        if isinstance(plan, Path) or str(plan).endswith((".yaml", ".yml", ".json")):
            return cls.load(plan)
        if isinstance(plan, str):
            return cls.preset(plan)
        raise PlanError(f"plan {plan!r} cannot be used: allowed are a Plan, a preset's name and a plan file")

    def to_yaml(self) -> str:
        """The plan as YAML, with the fields that were set."""
        return yaml.safe_dump(
            self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, default_flow_style=None, width=160
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in problem["loc"]).lstrip(".") or "plan"
        message = problem["msg"].removeprefix("Value error, ")
        held = problem.get("input")
        shown = "" if isinstance(held, dict | list) or repr(held) in message else f" (it held {held!r})"
        lines.append(f"{where}: {message}{shown}")
    return "; ".join(lines)
