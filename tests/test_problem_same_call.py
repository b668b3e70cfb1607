"""Which calls count as the same call for whatever is kept between calls."""

from __future__ import annotations

import numpy as np

from rawattn._call.options import Options, structural
from rawattn._runtime.option_arrays import with_arrays
from rawattn._runtime.verbs import FORWARD


def test_calls_that_differ_in_a_type_alone_share_nothing() -> None:
    """A call that is refused must still be refused after an equal call of other types was accepted."""
    usual = structural(Options(sink=0, window=(1, 2)))
    assert structural(Options(sink=0, window=(1, 2))) == usual
    for other in (
        Options(sink=False, window=(1, 2)),
        Options(sink=0, window=(True, 2)),
        Options(sink=0, window=(1.0, 2)),
        Options(sink=0, window=(1, 2), num_splits=0),
    ):
        assert structural(other) != usual


def test_the_values_of_options_arrays_tell_no_calls_apart() -> None:
    """The values of arrays of options are data: another array of the same form makes the same call."""
    first, second = (with_arrays(FORWARD, Options(bias=np.full((5, 7), x))) for x in (0.0, 1.0))
    assert structural(first.options) == structural(second.options)
    assert first.verb is second.verb
    assert first.arrays[0] is not second.arrays[0]


def test_which_arrays_a_call_has_tells_it_apart() -> None:
    bias, slopes = np.zeros((5, 7), np.float32), np.zeros(4, np.float32)
    verbs = {
        with_arrays(FORWARD, options).verb
        for options in (
            Options(),
            Options(bias=bias),
            Options(alibi_slopes=slopes),
            Options(bias=bias, alibi_slopes=slopes),
            Options(dropout_p=0.5, seed=3),
            Options(dropout_p=0.5, seed=np.array([3])),
        )
    }
    assert len(verbs) == 6
    assert FORWARD in verbs


def test_an_int_seed_is_a_value_of_the_call() -> None:
    first, second = (with_arrays(FORWARD, Options(dropout_p=0.5, seed=x)) for x in (3, -1))
    assert (first.values, second.values) == ((3,), (2**64 - 1,))
    assert structural(first.options) == structural(second.options)
