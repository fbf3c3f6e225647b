"""Triton's interpreter, which runs kernels on a CPU, in a process of its own.

It must be chosen before anything imports triton, as transformers' models do; so nothing here may.
`python -m tests.generator_service.interpreter MODULE ARGUMENTS` runs a module under it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def process() -> Iterator[Executor]:
    """A process whose kernels are interpreted, one torch thread."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=choose) as executor:
        yield executor


def choose() -> None:
    """From here on, kernels that are defined are interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    _let_tensors_be_indices(interpreter)
    _let_bfloat16_be_multiplied(interpreter)
    _let_functions_call_each_other_fast(interpreter)


def _let_tensors_be_indices(interpreter: Any) -> None:
    """Triton 3.6 calls int() on arrays of one element, which numpy refuses since 2.4."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def _let_bfloat16_be_multiplied(interpreter: Any) -> None:
    """Triton 3.6 multiplies the bits of bfloat16 matrices as if they were integers."""
    from triton.language import bfloat16, float32

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        bits = interpreter._convert_float(handle.data, bfloat16, float32, None)
        return interpreter.TensorHandle(bits.view("float32"), float32)

    multiply = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(
        self, widened(a), widened(b), *rest
    )


def _let_functions_call_each_other_fast(interpreter: Any) -> None:
    """Triton 3.6 prepares the whole language anew for each call inside a kernel."""
    from triton.language import cdiv

    interpreter._patch_lang(cdiv.fn)  # what functions of Triton's own library see
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **options: self.rewrite()(
        *args, **options
    )


if __name__ == "__main__":
    choose()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
