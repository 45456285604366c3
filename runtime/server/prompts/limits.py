"""Limits of the work on one request's text: time, memory, sizes."""

MAX_BODY = 32 << 20  # bytes of a body, unless the operator sets it
SMALL_BODY = 64 << 10  # bytes; a body up to this size is first tried with QUICK_CPU_S
# CPU seconds of one job. Tokenising takes 0.3 to 1 s a MiB, JSON 0.03 s.
QUICK_CPU_S = 0.5  # a job that needs more is started again among the long ones
CPU_S, CPU_S_PER_MIB, MOST_CPU_S = 2.0, 4.0, 60.0
GRAMMAR_QUICK_CPU_S, GRAMMAR_CPU_S = 0.5, 5.0
LOAD_CPU_S = 60.0  # loading tokenizer and template
# Seconds by the clock; a process that is stopped or swapped out uses no CPU time.
QUICK_WALL_S, WALL_S, WALL_PER_CPU_S = 3.0, 10.0, 10.0
LOOK_S = 1.0  # interval of checking whether a slow worker is stopped
FORK_AGAIN_S = 0.2
HELLO_S = 5.0  # for a new worker's first message
LOAD_S = 300.0
MORE_MEMORY = 1 << 30  # bytes of address space beyond what the process has after loading
GRAMMAR_STACK = 512 << 20  # bytes more: a compilation's stack
LOAD_MEMORY = 4 << 30  # bytes of address space for loading
GROWN = 16 << 20  # bytes; a worker that grew by more ends after its answer and is replaced
# Workers of each kind; `nice` of the operating system for those that may run long.
QUICK_WORKERS, LONG_WORKERS, GRAMMAR_QUICK_WORKERS, GRAMMAR_WORKERS = 2, 2, 1, 2
LONG_NICE = 10
STUCK_S = 10.0  # without an end of a job while jobs wait, beyond its limit: unhealthy
STARTS_S = 15.0  # without a worker that could be started: unhealthy
MOST_DECODED = 256 << 20  # bytes of decoded images that are kept; more than one request's
MOST_SEEN = 256  # of them
KNOWN_FORMS = 16 << 20  # characters of cached grammars
MOST_WORDS = 2000  # characters of an error
# Sizes of answers, since the event loop handles them.
MOST_CHARACTERS = 4 << 20  # of a text that is tokenised whole: a token of each takes some 300 bytes
MOST_TEXT = 16 << 20  # characters of all texts of one request
MOST_TOKENS = 2 << 20  # prompt tokens of one request, times n; or one prompt of the engine's length
MOST_SHOWN = 256 << 10  # the same where the answer repeats the prompt; and characters of echoes
MOST_TYPES = 256 << 10  # bytes of the names and types of all tools' parameters
MOST_HEADER = 4 << 20  # bytes of an answer in addition to prompts and items
