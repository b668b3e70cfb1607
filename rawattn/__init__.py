"""Attention for people who do not want PyTorch: CUDA kernels compiled at run time behind a NumPy-like API."""

from rawattn import reference
from rawattn._api import attention
from rawattn._api_backward import attention_backward, attention_vjp
from rawattn._gradients import Gradients
from rawattn._layout import SeqLayout

__version__ = "0.1.0"

__all__ = [
    "Gradients",
    "SeqLayout",
    "__version__",
    "attention",
    "attention_backward",
    "attention_vjp",
    "reference",
]
