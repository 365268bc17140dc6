"""Draws random training programs: whatever torch's optimizers accept, and nothing that fails without this project, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.random_modules import FLOATS, FORMS, HALVES, ONLY_FP32, Part
from tests.random_training import EDITS, HOOKS, SCHEDULERS, Edit, Optim, Program

LAST_MAX = 12

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.1, "weight_decay": 0.01},
        {"weight_decay": 0.01, "maximize": True},
    ],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-6}, {"lr": "tensor"}],
    "AdamW": [{}, {"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-6}, {"lr": "tensor"}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"maximize": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}, {"weight_decay": 0.01}],
    "Adamax": [{}, {"weight_decay": 0.01}, {"maximize": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "Adadelta": [{}, {"weight_decay": 0.01}],
    "ASGD": [{}, {"t0": 2.0, "weight_decay": 0.01}],
    "Rprop": [{}, {"maximize": True}],
    "Adafactor": [{}, {"weight_decay": 0.01}],
    "Muon": [{}],
    "LBFGS": [{"max_iter": 3, "history_size": 3}, {"max_iter": 2, "line_search_fn": "strong_wolfe"}],
    "SparseAdam": [{}],
}
"""Arguments by optimizer."""

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
WITHOUT_FOREACH = ("Muon", "LBFGS", "SparseAdam")
_KINDS = [*OPTIONS, "SGD", "Adam", "AdamW", "Adam", "AdamW"]
_CAN_BE_SPARSE = ("SGD", "Adagrad", "SparseAdam")
_MATRICES = frozenset({"matrix", "lookup", "transposed", "slice"})


@dataclass(frozen=True)
class Sequence:
    """When a program's checkpoints are waited for, when it dies, and where it then begins.

    Attributes:
        crashes: steps after which the process dies; the last one ends the test.
        torn: each crash is in the middle of the next iteration.
        drains: steps after which the keeper is waited for.
        full: step after which a full checkpoint is asked for; 0 for none.
        back: at the end an older cut is restored as well, this many before the newest.
        options: of the store.
    """

    crashes: tuple[int, ...]
    torn: bool
    drains: frozenset[int]
    full: int
    back: int
    options: dict[str, Any]


def accepts(optim: Optim, part: Part) -> bool:
    """Whether torch's optimizer of this kind and these options takes the parameters and gradients of a part."""
    kind, options = optim.kind, optim.options
    if kind == "SparseAdam" or part.form == "sparse":
        plain = not any(options.get(name) for name in ("fused", "momentum", "weight_decay"))
        return part.form == "sparse" and kind in _CAN_BE_SPARSE and plain and part.dtype not in HALVES
    if kind == "Muon":
        return part.form in _MATRICES and part.dtype != "float16"
    if kind == "LBFGS":
        return part.form not in ("complex", "empty", "conv", "transposed", "slice") and part.dtype == "float32"
    if kind == "SGD" and options.get("fused") and options.get("momentum") and part.dtype in HALVES:
        return False  # this kernel of torch's gives other bits for the same tensors from call to call
    if kind == "Adafactor" or options.get("fused"):
        return part.form != "complex" and (kind != "Adafactor" or part.form != "empty")
    return True


@st.composite
def _optims(draw: st.DrawFn) -> Optim:
    kind = draw(st.sampled_from(_KINDS))
    options = dict(draw(st.sampled_from(OPTIONS[kind])))
    kernels: list[dict[str, bool]] = [{}] if kind in WITHOUT_FOREACH else [{}, {"foreach": True}, {"foreach": False}]
    kernels += [{"fused": True}] * 3 if kind in FUSED else []
    kernel = draw(st.sampled_from(kernels))
    if options.get("lr") == "tensor" and "fused" not in kernel:
        kernel = {"foreach": False}
    rests = draw(st.sampled_from([0, 0, 0, 2, 3]))
    return Optim(kind, options | kernel, (), kind != "LBFGS" and draw(st.booleans()), rests)


@st.composite
def _parts(draw: st.DrawFn, forms: list[str]) -> Part:
    form = draw(st.sampled_from(forms))
    dtypes = [dtype for dtype in ("float32", *FLOATS) if form != "sparse" or dtype not in HALVES]
    dtype = "float32" if form in ONLY_FP32 else draw(st.sampled_from(dtypes))
    return Part(form, dtype, draw(st.sampled_from([0, 0, 0, 2, 3])))


def _home(optim: Optim) -> Part:
    """A part that keeps an optimizer from being empty, and has a gradient in every iteration."""
    return Part({"Muon": "matrix", "SparseAdam": "sparse"}.get(optim.kind, "linear"))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program that runs without this project."""
    drawn = draw(st.lists(_optims(), min_size=1, max_size=2))
    parts = [_home(optim) for optim in drawn]
    owners = list(range(len(drawn)))
    for part in draw(st.lists(_parts(list(FORMS)), max_size=4)):
        takers = [i for i, optim in enumerate(drawn) if accepts(optim, part)]
        parts.append(part)
        owners.append(draw(st.sampled_from([*takers, *takers, -1])))
    closures = any(optim.kind == "LBFGS" for optim in drawn)
    loops = ["plain", "plain", "accumulate", "micro", "twice", "closure"] + ["scaler", "backward"] * (not closures)
    loop = draw(st.sampled_from(loops))
    if loop == "scaler":
        parts = [replace(p, dtype="float32") if p.dtype == "float16" else p for p in parts]
        owners = [-1 if parts[i].form == "complex" else owner for i, owner in enumerate(owners)]
    added = None
    last = owners[-1]
    if loop != "backward" and len(parts) > len(drawn) and last >= 0 and drawn[last].kind != "LBFGS" and draw(st.booleans()):
        added = (draw(st.integers(2, LAST_MAX)), last, len(parts) - 1)
        owners[-1] = -1
    optims = [replace(optim, parts=tuple(at for at, owner in enumerate(owners) if owner == i)) for i, optim in enumerate(drawn)]
    edits = draw(st.lists(_edits(), max_size=4))
    if any(optim.options.get("fused") and optim.options.get("momentum") for optim in optims):  # torch fails where only some have a buffer
        optims = [replace(optim, grouped=optim.grouped or optim.kind == "SGD") for optim in optims]
        edits = [edit for edit in edits if edit.what not in ("clear one", "freeze", "unfreeze")]
    if loop != "backward":  # where the gradient arrives at the parameter, and the optimizer of its master would not be called
        given = [{*optim.parts, *([added[2]] if added is not None and added[1] == i else [])} for i, optim in enumerate(optims)]
        real = [all(parts[at].form != "complex" for at in each) for each in given]  # `.float()` would take the real part of complex ones
        optims = [replace(optim, masters=can and draw(st.booleans())) for optim, can in zip(optims, real, strict=True)]
    scheduled = added is None and loop != "micro" and draw(st.booleans())
    return Program(
        parts=tuple(parts),
        optims=tuple(optims),
        added=added,
        edits=tuple(edits),
        hooks=tuple(draw(st.lists(st.sampled_from(sorted(HOOKS)), max_size=2, unique=True))),
        loop=loop,
        zeros=draw(st.integers(0, 3)) == 0,
        clip="" if loop in ("closure", "backward") or closures else draw(st.sampled_from(["", "norm", "norm loop", "value"])),
        scheduler=draw(st.sampled_from(SCHEDULERS)) if scheduled else "",
        infinite=draw(st.sampled_from([0, 2, 3, 5])) if loop == "scaler" else 0,
        flush_denormal=draw(st.booleans()),
    )


def _edits() -> st.SearchStrategy[Edit]:
    return st.builds(Edit, st.integers(2, LAST_MAX), st.sampled_from(sorted(EDITS)), st.booleans(), st.integers(0, 9))


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """When it is waited, when it dies, and how the store is kept."""
    last = draw(st.integers(4, LAST_MAX))
    crashes = [*draw(st.lists(st.integers(1, last - 1), max_size=1)), last]
    steps = st.integers(1, crashes[-1])
    options: dict[str, Any] = {
        "refresh": draw(st.integers(1, 5)),
        "log_steps": draw(st.integers(2, 5)),
        "full_every": draw(st.sampled_from([2, 5, 1000])),
        "verify": draw(st.sampled_from(["rolling", "rolling", "step"])),
    }
    if draw(st.integers(0, 9)) == 0:
        options["nvme"] = "none"
    if draw(st.integers(0, 3)) == 0:
        options["compress"] = "zstd:1"
    drains = draw(st.frozensets(steps, max_size=crashes[-1]))
    return Sequence(tuple(crashes), draw(st.booleans()), drains, draw(st.sampled_from([0, 0, 3, 6])), draw(st.integers(0, 3)), options)
