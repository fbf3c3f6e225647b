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

from generator_service.grammar import CompiledGrammar, TokenizerSpec, Vocabulary

# Processor seconds per output; a large schema, such as one with 500 properties, takes half.
MAX_S = 0.5
_MAX_BYTES = 4 << 30
_NUM_TOKENS = 32


def main() -> None:
    """Until the standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
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
