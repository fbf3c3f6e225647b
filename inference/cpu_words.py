"""The layout of attention's jobs: what each int64 word of their tables means."""

# A job: addresses, strides in elements, sizes. LONGEST is the most tokens that a row sees;
# ROW_PANELS of rows that decode and PANELS of prompts are what threads share.
COUNTER, ROW_PANELS, REALS, SEGMENTS, NUM_SEGMENTS, PARTS = range(6)
QUERY, QUERY_ROW, QUERY_HEAD = 6, 7, 8
KEY, KEY_ROW, KEY_HEAD = 9, 10, 11
VALUE, VALUE_ROW, VALUE_HEAD = 12, 13, 14
OUTPUT, HEADS, KV_HEADS, DIM, LONGEST = 15, 16, 17, 18, 19
PROMPTS, NUM_PROMPTS, PANELS, ALL_PARTS = 20, 21, 22, 23
JOB_WORDS = 24

# Rows that decode: where they begin and how many, their suffix store (of ROOM tokens per row, of
# which FIRST_OWN .. LENGTH - 1 are seen), their prompt's parts and its tokens.
ROW, ROWS, PART, NUM_PARTS, OWN_KEYS, OWN_VALUES, ROOM = range(7)
LENGTH, FIRST_OWN, TOKENS = range(7, 10)
SEGMENT_WORDS = 10

# Rows that are consecutive tokens of a prompt, from position START on; the first seven words are
# the same. What stands before them is the parts, from position SEEN on. They go to their store (of
# ROOM tokens) from OFFSET on, unless its addresses are 0. WINDOW is 0 where all is seen.
START, SEEN, OFFSET, WINDOW = range(7, 11)
PROMPT_WORDS = 11

# A part of a prompt: tokens FIRST .. FIRST + COUNT - 1 of a store of STORED.
STORED, FIRST, COUNT, KEYS, VALUES = range(5)
PART_WORDS = 5
