"""Attention for people who do not want PyTorch: CUDA kernels compiled at run time behind a NumPy-like API."""

from rawattn import reference
from rawattn._call.gradients import Gradients
from rawattn._call.layout import SeqLayout
from rawattn._scores.score_mod import ScoreMod
from rawattn._verbs.attention import attention
from rawattn._verbs.backward import attention_backward, attention_vjp
from rawattn._verbs.plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "Plan",
    "ScoreMod",
    "SeqLayout",
    "__version__",
    "attention",
    "attention_backward",
    "attention_vjp",
    "plan",
    "reference",
]
