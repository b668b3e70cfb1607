"""`rawattn.attention` as a function of PyTorch: autograd, torch.compile, and models of `transformers`.

Importing this module imports torch. `import rawattn` alone imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import rawattn
from rawattn._call.hints import no_attribute

try:
    from rawattn._torch.attention import attention
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "rawattn.torch is for PyTorch, which is not installed: pip install torch"
    ) from None

__all__ = ["attention", "register_transformers"]


def register_transformers(name: str = "rawattn") -> None:
    """Register `rawattn.torch.attention` as an attention implementation of `transformers`.

    Models made with ``attn_implementation=name``, or switched by ``model.set_attn_implementation(name)``, then train and
    generate with it. Registering twice changes nothing.

    Parameters
    ----------
    name : str
        The name under which transformers finds it.

    Raises
    ------
    ImportError
        If transformers is not installed.

    Notes
    -----
    No mask is made in memory for causal, full and sliding-window attention, padding on either side, packed sequences by
    `position_ids`, and prefill and decoding with a dynamic or static cache. The results of queries that are padding are
    meaningless. In all other cases transformers passes a mask or a bias in memory: padding between tokens, chunked
    attention, masks of four axes, position biases. Soft caps, learned sinks and attention dropout are supported.
    `output_attentions` raises ValueError, and the paged cache of continuous batching raises NotImplementedError.

    Under autocast q, k and v are converted as for torch's own attention. The positions of padding are read back to the host
    once a forward pass, which waits for the GPU; torch.compile breaks its graph there.

    Examples
    --------
    >>> import torch
    >>> from rawattn.torch import register_transformers
    >>> register_transformers()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...                      num_attention_heads=4, num_key_value_heads=2, attn_implementation="rawattn")
    >>> model = LlamaForCausalLM(config)
    >>> ids = torch.arange(12).view(2, 6)
    >>> model(ids, labels=ids).loss.backward()
    """
    from rawattn._torch import transformers

    transformers.register(name)


if not TYPE_CHECKING:  # type checkers would take every name for one of the module's

    def __getattr__(name: str) -> NoReturn:
        raise no_attribute("rawattn.torch", name, rawattn.__all__)
