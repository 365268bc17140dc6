"""A job's whole state as `torch.distributed.checkpoint` takes it, plain or sharded; and what each tensor of it is, byte for byte."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


def flat_state(model: torch.nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Everything under `model.` and `optim.`; makes the optimizer's state where there is none, by a step of zeros."""
    model_state, optimizer_state = get_state_dict(model, optimizers, options=FLAT)
    flat = {f"model.{key}": value for key, value in model_state.items()}
    return flat | {f"optim.{key}": value for key, value in optimizer_state.items()}


def put_back(model: torch.nn.Module, optimizers: Optimizers, flat: dict[str, Any]) -> None:
    """Give a job the state that was loaded."""
    parts = [{key.removeprefix(part): value for key, value in flat.items() if key.startswith(part)} for part in ("model.", "optim.")]
    set_state_dict(model, optimizers, model_state_dict=parts[0], optim_state_dict=parts[1], options=FLAT)


def dcp_load(flat: dict[str, Any], reader: StorageReader, planner: LoadPlanner | None = None) -> dict[str, Any]:
    """`dcp.load` in a single process, without its warning that this is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(flat, storage_reader=reader, planner=planner)
    return flat


def load_job(model: torch.nn.Module, optimizers: Optimizers, reader: StorageReader) -> None:
    """All of it, as the README has it: nested, where `flat_state` is flat."""
    model_state, optimizer_state = get_state_dict(model, optimizers, options=FLAT)
    state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
    dcp_load(state, reader)
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"], options=FLAT)


def digests(flat: dict[str, Any]) -> dict[str, str]:
    """Every tensor's dtype, shape and bytes, whole where it is sharded (collective then); anything else as text."""
    found: dict[str, str] = {}
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
            raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
            found[key] = f"{whole.dtype} {list(whole.shape)} {hashlib.blake2s(raw).hexdigest()}"
        else:
            found[key] = repr(value)
    return found
