"""Derivatives that a call does not support: clear errors where JAX would give zeros or an unclear one. Imports JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from rawattn._call.option_advice import learned_slopes
from rawattn._interop.xla import is_traced


def constant(name: str, array: Any, align: str) -> Any:
    """The array of an option that has no gradient, wrapped so that a derivative with respect to it raises TypeError."""
    if not is_traced(array) or not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    if name == "alibi_slopes":
        shown, wanted = name, f"score_mod={learned_slopes(align)}"
    else:
        shown, wanted = f"score_mod: captured {name}", f"name it in wrt={(name,)}"
    says = (
        f"{shown}: got an array whose gradient is taken, which it does not get; pass jax.lax.stop_gradient({name}), or "
        f"{wanted}"
    )
    return _without_derivatives(lambda x: x, says)(array)


def first_derivatives_alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which runs inside a custom_vjp. Differentiating it means a second derivative, which raises TypeError."""
    return _without_derivatives(
        call,
        "rawattn.jax.attention has first derivatives alone: got a gradient of its gradient, expected none; call "
        "jax.nn.dot_product_attention for that",
    )


def _without_derivatives(call: Callable[..., Any], says: str) -> Callable[..., Any]:
    """`call`, which raises TypeError if one of its arguments is differentiated."""
    function = jax.custom_jvp(call)

    @function.defjvp  # type: ignore[untyped-decorator]
    def refuse(*_: Any) -> NoReturn:
        raise TypeError(says)

    return function  # type: ignore[no-any-return]
