"""`rawattn.attention` as a function of PyTorch: autograd, torch.compile, and models of `transformers`.

The only module beside `rawattn.jax` that imports a framework, and only when it is imported itself.
"""

from __future__ import annotations

from typing import NoReturn

import rawattn
from rawattn._call.hints import no_attribute
from rawattn._torch.attention import attention

__all__ = ["attention", "register_transformers"]


def register_transformers(name: str = "rawattn") -> None:
    """Make `rawattn.torch.attention` an attention implementation of `transformers`.

    Models made with ``attn_implementation=name``, and models told so by ``model.set_attn_implementation(name)``, then
    train and generate with it. Registering twice changes nothing.

    Parameters
    ----------
    name : str
        What transformers is to call it.

    Raises
    ------
    ImportError
        Where transformers is not installed.

    Notes
    -----
    Without a mask in memory: causal, full and sliding-window attention, padding on either side, packed sequences by
    `position_ids`, prefill and decoding with a dynamic or static cache. Of queries that are padding the results mean
    nothing. Everything else comes as a mask or as numbers to add: padding between tokens, chunked attention, masks of four
    axes, position biases. Soft caps, learned sinks and attention dropout are taken too. `output_attentions` is a
    ValueError, and a paged cache of continuous batching a NotImplementedError.
    Under autocast q, k and v are converted as for torch's own attention. Where the padding is, is read back once a
    forward pass, which waits for the GPU; torch.compile breaks its graph there.

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


def __getattr__(name: str) -> NoReturn:
    raise no_attribute("rawattn.torch", name, rawattn.__all__)
