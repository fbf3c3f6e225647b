// Generated from the schema's comments by deploy.stubs. Do not edit.
export const FIELDS = {
  "Selection.n": "Candidates at the start; 0 .. the server's limit. 0: as many as the free slots hold at the first decision token, at most the generator's auto_candidates, at least min_answers. Absent: 1 at temperature 0, else the server's default_n, or as many as return_candidates, min_answers or branching's width need.",
  "Selection.algorithm ALGORITHM_SPECULATIVE_REJECTION ALGORITHM_BEST_OF_N": "How the best is found. Speculative rejection: Rejects the lowest fraction alpha at every decision token. Best of n: Generates every candidate to its end: Speculative Rejection with alpha 0.",
  "Selection.alpha": "Fraction of the ranked candidates rejected at each decision token; [0, 1); default 0.5.",
  "Sampling.max_tokens": "Maximum number of new tokens per candidate; 1 .. context - prompt; absent: context - prompt, up to the server's default_max_tokens.",
  "Selection.schedule SCHEDULE_KIND_GEOMETRIC SCHEDULE_KIND_TOKENS SCHEDULE_KIND_MEMORY": "The decision tokens; absent: the server's default_schedule. Geometric: At first, first * factor, first * factor^2, ..., rounded down. Tokens: At the listed tokens. Memory: None: only full slots end a round, the paper's own trigger.",
  "Schedule.first": "Geometric: the first decision token. Memory: tokens for which each candidate has room when the session opens; with n = 0, full slots end the first round there. 1 or more; default 16.",
  "Schedule.factor": "Geometric: the ratio of decision tokens; 1.01 .. 16; default 2.",
  "Schedule.tokens": "Tokens: the decision tokens, strictly ascending, each 1 or more; 1 to 1024 of them.",
  "Branching.width": "Live candidates after a decision token, as far as taper, slots and the deadline allow; 2 .. the server's limit of n; default 16.",
  "Branching.keep": "Live candidates that are kept, all others are rejected; 1 .. width - 1; default 4.",
  "Branching.taper": "Rounds that are longer than the first one have fewer live candidates: width * (tokens of the first round / tokens of this one)^taper, at least keep. 1: all rounds generate about as many tokens. 0 .. 1; default 0.",
  "Selection.rewards": "The reward, or up to 8 to be summed; each name once; absent: the server's default.",
  "Selection.stop_at": "The request ends as soon as a complete answer that is not vetoed has at least this score; -1e12 .. 1e12; absent: never. Not with rewards that are normalized by the batch.",
  "Selection.waves": "Candidates begin in waves: so many, then as many as there are already, up to n, and with a vote no more than may decide it and at least the number of the first wave. Each wave begins after the one before has ended, unless the request ends before. A candidate is the same in whichever wave. 0 .. the server's limit of n; 0: all at once. Not with branching or n = 0.",
  "Selection.vote VOTE_EXTRACTOR_NUMBER VOTE_EXTRACTOR_BOXED VOTE_EXTRACTOR_TOOL_CALL VOTE_EXTRACTOR_REGEX VOTE_EXTRACTOR_JSON": "The answer that most candidates agree on; absent: the one with the best reward. Without alpha nothing is rejected for its rank. Number: The last number in the text; 1,000 and 1000.0 are equal. Boxed: The content of the last \\boxed{}. Tool call: Name and arguments of the call in the text. Regex: The first group of the last match of a regular expression, in RE2's syntax; without a group the match. Json: The value at a JSON pointer (RFC 6901) in the JSON of the text.",
  "GenerateRequest.model": "The model's name; empty: the one that is served.",
  "Sampling.temperature": "Softmax temperature; 0 (greedy, then n must be 1) or 0.01 .. 2; default 1.",
  "Sampling.seed": "Randomness is keyed by (seed, candidate, step); 0 .. 2^63 - 1; default 0.",
  "GenerateRequest.cache_control": "What the cache may do."
};
