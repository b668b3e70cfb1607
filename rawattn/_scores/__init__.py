"""The language of score functions and mask predicates.

    text  ->  language: a typed expression  ->  derive: its derivatives
                                            ->  numpy_eval: values on the host
                                            ->  cuda_text: C++ for a kernel

`score_mod.ScoreMod` is the public class: a text and the arrays and numbers that it captures.
"""
