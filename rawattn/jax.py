"""`rawattn.attention` as a function of JAX: under jit, grad, vmap and scan, on XLA's buffers and XLA's stream.

Importing this module imports JAX. `import rawattn` alone imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import rawattn
from rawattn._call.hints import no_attribute

try:
    from rawattn._jax.attention import attention
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ImportError(
        "rawattn.jax is for JAX, which is not installed: pip install 'jax[cuda13]'"
    ) from None

__all__ = ["attention"]


if not TYPE_CHECKING:  # type checkers would take every name for one of the module's

    def __getattr__(name: str) -> NoReturn:
        raise no_attribute("rawattn.jax", name, rawattn.__all__)
