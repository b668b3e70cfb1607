"""Attention for people who do not want PyTorch: CUDA kernels compiled at run time behind a NumPy-like API."""

from typing import TYPE_CHECKING, Any

from rawattn._call.gradients import Gradients
from rawattn._call.hints import no_attribute
from rawattn._call.seq_layout import SeqLayout
from rawattn._masks.block_mask import BlockMask
from rawattn._scores.score_mod import ScoreMod
from rawattn._verbs.append import append_kv
from rawattn._verbs.attention import attention
from rawattn._verbs.backward import attention_backward, attention_vjp
from rawattn._verbs.block_mask import block_mask
from rawattn._verbs.combine import combine
from rawattn._verbs.paged import paged_attention
from rawattn._verbs.plan import Plan, plan
from rawattn._verbs.show_mask import show_mask
from rawattn._verbs.topk_mask import topk_mask
from rawattn._verbs.vectorized import unpack_pages

if TYPE_CHECKING:
    from rawattn import reference

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "Gradients",
    "Plan",
    "ScoreMod",
    "SeqLayout",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_vjp",
    "block_mask",
    "combine",
    "paged_attention",
    "plan",
    "reference",
    "show_mask",
    "topk_mask",
    "unpack_pages",
]


if not TYPE_CHECKING:  # type checkers would take every name for one of the module's

    def __getattr__(name: str) -> Any:
        """Imports `rawattn.reference`, which few programs use, on first access."""
        if name in ("reference", "parallel"):
            import importlib

            try:
                return importlib.import_module(f"rawattn.{name}")
            except ModuleNotFoundError as error:
                raise AttributeError(str(error)) from error
        raise no_attribute("rawattn", name)
