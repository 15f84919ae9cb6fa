"""Draws in the form that ArviZ 1.x takes them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from isosgd.predictive.examine import chosen

if TYPE_CHECKING:
    from isosgd.predictive.posterior import Posterior


def to_arviz(posterior: Posterior, data: Any, parameters: Sequence[str] | None) -> Any:
    """See `Posterior.to_arviz`."""
    try:
        arviz = importlib.import_module("arviz_base")
    except ImportError as error:
        raise ImportError('to_arviz needs arviz-base: pip install "isosgd[arviz]"') from error
    names = list(posterior.shapes) if parameters is None else chosen(posterior, parameters)
    groups = {"posterior": {name: _array(posterior.draws[name]) for name in names}}
    if data is not None:
        groups["log_likelihood"] = {"y": _array(posterior.log_likelihood(data))}
    # Attributes must be plain for files of ArviZ: what is nested goes as JSON.
    attrs = {key: value if isinstance(value, str | int | float) else json.dumps(value, default=str)
             for key, value in posterior.info.items()}  # fmt: skip
    attrs["inference_library"] = "isosgd"
    return arviz.from_dict(groups, attrs={"posterior": attrs})


def _array(values: torch.Tensor) -> Any:
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
