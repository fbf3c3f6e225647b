"""Tries structured outputs in a process of its own, which ends if one takes too long.

A few characters can describe hours of work, and a thread cannot be killed. So each output is first
compiled here and followed with random tokens; the service uses only outputs that pass. Run by
`grammar.Trials`: reads the tokenizer, then one grammar per line, and writes an error or nothing for
each, all as JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from random import Random

from generator_service.engine.grammar import CompiledGrammar, TokenizerSpec, Vocabulary

# Of stack, half of a thread's: the service compiles again, in a thread of its own, where references
# one behind another that pass here must not overflow.
_STACK_BYTES = 4 << 20
_THREAD_BYTES = 2 << 20  # of glibc's threads, where the stack of the main one is unlimited
# Processor seconds per output; a large schema, such as one with 500 properties, takes half.
MAX_S = 0.5
_MAX_BYTES = 4 << 30
_NUM_TOKENS = 32


def main() -> None:
    """Until the standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given, most = resource.getrlimit(resource.RLIMIT_STACK)
    of_threads = _THREAD_BYTES if given == resource.RLIM_INFINITY else given
    resource.setrlimit(resource.RLIMIT_STACK, (min(_STACK_BYTES, of_threads // 2), most))
    *spec, end_ids = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(TokenizerSpec(*spec).load(), end_ids)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, MAX_S)  # its signal ends the process
        error = ""
        try:
            grammar = CompiledGrammar.of(json.loads(line), vocabulary)
            grammar.matchers().walk(_NUM_TOKENS, Random(0))
        except ValueError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
