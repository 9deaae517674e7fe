"""Grammars of answers: compiled by llguidance, which is imported when the first request has a constraint, and
followed token by token on the host: as bitmasks over the vocabulary, which `pass_grammars.py` applies to
logits."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from idlm.config.project import install_command
from idlm.contracts import Constraint
from idlm.errors import UserError
from idlm.infer.structured.schemas import JSON_OPTIONS, answer_rules, read_warnings
from idlm.infer.structured.vocabulary import LARK, Vocabulary
from idlm.log import get_logger

SLOW_MASK, SLOW_MASKS, SLOW_SHARE = 0.003, 1.0, 0.02
"""CPU seconds from which a mask is slow, of all slow masks at once, and their share in the long run."""
WORK_OF_MASK = 3.0
"""Seconds that a pass costs for each of a slow grammar's first mask, with drafts and tokens."""
REFUSED_SECONDS = 60.0
"""How long a grammar that used the budget up is refused, and how long the budget counts as short then."""
OWN_SECONDS = 0.05
"""Slow masks that a grammar may have in that time although others have used the budget up."""
FAST_PASSES = 64
"""After so many passes without a slow mask a grammar is not on trial any more."""
TOO_SLOW = "it takes too long to compute the tokens that may follow, because it is too ambiguous"
STACK_BYTES = 1 << 29
MAX_COMPILED = 32
NUM_PEERS, PEER_SECONDS = 8, 0.1
"""Lexers of a grammar, as many as the threads that compute bits, and the time to compile further ones."""
MAX_ITEMS_IN_ROW = 1200
"""States that an ambiguous grammar may be in at once; the time of a mask may grow with their third power."""
STEP_ITEMS, ITEMS_BY_LENGTH = (4000, 8000), 50_000_000
"""Range of the states that a mask may visit, and their number times the grammar's length."""
LEXER_WORK = (200_000, 100_000)
"""Expressions that a lexer may make for the first mask, and for each further one: some 60 MB at most."""
TRIM_SECONDS = 0.05
"""A refusal that took so long returns its memory to the system, for which allocations of others wait."""
MAX_COSTS = 4096
"""Grammars of which it is known whether they are too slow."""

Peers = deque[tuple[int, Any]]
WORD_BITS = 32
"""llguidance writes whole words of bits."""


class Budget:
    """Seconds of slow masks that are left to all grammars of the server: eight answers with slow masks stall
    the others as much as one whose masks are eight times as slow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._time, self._left = clock, clock(), SLOW_MASKS
        self._short_until = -float("inf")

    @property
    def is_short(self) -> bool:
        """Whether slow masks used it up a short time ago."""
        return self.clock() < self._short_until

    def take(self, seconds: float) -> bool:
        """Spend seconds; False if there were not so many."""
        now = self.clock()
        self._left = min(SLOW_MASKS, self._left + SLOW_SHARE * (now - self._time))
        self._time, is_left = now, self._left >= seconds
        self._left = max(0.0, self._left - seconds)
        if not is_left:
            self._short_until = now + REFUSED_SECONDS
        return is_left


class Cost:
    """Whether the masks of one grammar used the budget up. `num_fast`: passes without a slow mask of it."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self._until = budget, -float("inf")
        self.num_fast, self._spent, self._since = 0, 0.0, budget.clock()

    @property
    def is_on_trial(self) -> bool:
        """Whether one answer of such grammars runs at a time: the budget is short, and this one may be
        slow."""
        return self.budget.is_short and self.num_fast < FAST_PASSES

    @property
    def is_refused(self) -> bool:
        return self.budget.clock() < self._until

    def refusal_ended(self) -> bool:
        """Whether a refusal, which may have been that of a first mask, is over: true once."""
        is_over = -float("inf") < self._until <= self.budget.clock()
        self._until = -float("inf") if is_over else self._until
        return is_over

    def charge(self, seconds: float) -> bool:
        """Note the CPU time of a mask. Returns whether it is slow."""
        if seconds <= SLOW_MASK:
            return False
        now, self.num_fast = self.budget.clock(), 0
        if now > self._since + REFUSED_SECONDS:
            self._spent, self._since = 0.0, now
        work = WORK_OF_MASK * seconds
        self._spent += work
        if not self.budget.take(work) and self._spent > OWN_SECONDS:
            self._until = now + REFUSED_SECONDS
        return True


class Grammar:
    """The grammar of one answer, in the state after `token_ids`. `matcher` is llguidance's; it allows or
    forbids each of `vocab_size` tokens. `is_suspect`: the last masks took long, so the next is measured.
    `follower`: its copy for tokens on the device (`pass_grammars.Follower`) while a sequence decodes.
    `notes`: what of the constraint is not enforced. `cost` is that of all answers with this grammar.

    Branches share one lexer, which is locked while a mask is computed. `peers`: matchers before the first
    token by lexer; `lexer` is this one's."""

    def __init__(self, matcher: Any, vocab_size: int, peers: Peers, cost: Cost, lexer: int = 0) -> None:
        self.matcher, self.vocab_size, self.peers, self.lexer = matcher, vocab_size, peers, lexer
        self.token_ids: list[int] = []
        self.is_suspect, self.cost = False, cost
        self.follower: Any = None
        self.notes: tuple[str, ...] = ()

    def push(self, token_ids: Sequence[int]) -> bool:
        """Append tokens; False if one of them does not fit, after which the state is unknown."""
        is_taken: bool = self.matcher.consume_tokens(list(token_ids))
        self.token_ids += token_ids
        return is_taken

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow: the answer matches, and has a stop token or no longer one matches."""
        return bool(self.matcher.is_stopped())

    @property
    def problem(self) -> str | None:
        """Why the next token's mask is unknown; None if it is known."""
        if self.cost.is_refused:
            return TOO_SLOW
        error = str(self.matcher.get_error()).partition("<state>")[0].strip()
        return error or None

    def charge(self, seconds: float) -> None:
        """Note the CPU time of a mask, for which other requests waited. Many slow ones are a `problem`."""
        self.is_suspect = self.cost.charge(seconds)

    def mask_seconds(self) -> float:
        """Compute the next token's mask, which the matcher stores; returns the CPU time."""
        start = time.thread_time()
        self.matcher.compute_bitmask()
        return time.thread_time() - start

    def branch(self) -> Grammar:
        """Fork the matcher to try drafts."""
        copied = Grammar(self.matcher.deep_copy(), self.vocab_size, self.peers, self.cost, self.lexer)
        copied.token_ids = list(self.token_ids)
        return copied

    def apart(self) -> Grammar:
        """The grammar before the first token, with the next lexer: lexers compute their masks in parallel."""
        self.peers.rotate()
        lexer, matcher = self.peers[0]
        return Grammar(matcher.deep_copy(), self.vocab_size, self.peers, self.cost, lexer)


Compiling = Future[Grammar | UserError]
"""A grammar that is compiled, or why there is none."""


def num_words(grammar: Grammar) -> int:
    return -(-grammar.vocab_size // WORD_BITS)


def compute_bits(rows: Sequence[tuple[Grammar, Sequence[int], int]], bits_YW: torch.Tensor) -> None:
    """Write the tokens that may follow each grammar, and then each of its drafts, into `bits_YW` (int32 on
    the host) from the given row on. Rows after a draft that does not fit stay as they are."""
    buffer = bits_YW.data_ptr(), bits_YW.shape[1] * bits_YW.element_size(), len(bits_YW)
    # A thread takes neighbours, so that threads do not wait for each other's lexers.
    rows = sorted(rows, key=lambda one: one[0].lexer)
    alone = [(grammar.matcher, row) for grammar, drafts, row in rows if not drafts]
    drafting = [(grammar.matcher, row, list(drafts)) for grammar, drafts, row in rows if drafts]
    if alone:
        _executor().unsafe_compute_mask_ptr(alone, *buffer)
    if drafting:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafting, *buffer)


@functools.cache
def _executor() -> Any:
    """Threads that compute bits; the interpreter's lock is free meanwhile."""
    return importlib.import_module("llguidance").LLExecutor(min(NUM_PEERS, os.cpu_count() or 1))


class GrammarCompiler:
    """Compiles constraints for one tokenizer (None: a checkpoint without one) and `vocab_size` rows of
    logits. `eos_ids` end an answer that matches."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._recent: dict[Constraint, Compiling] = {}
        self._compiling = weakref.WeakValueDictionary[Constraint, Compiling]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._seconds, self._budget = 0.0, Budget()
        self._costs: dict[int, Cost] = {}

    def grammar(self, constraint: Constraint) -> Grammar:
        """The constraint's grammar before the first token. Raises UserError IDLM-0474 for one that cannot be
        compiled, IDLM-0475 for tokens without a known text, and IDLM-0476 without llguidance."""
        compiled = self.begin(constraint).result()
        if isinstance(compiled, UserError):
            # The stored one would grow by a traceback each time.
            raise UserError(compiled.code, compiled.message, fix=compiled.fix)
        return compiled.branch()

    def begin(self, constraint: Constraint) -> Compiling:
        """Begin to compile, in a thread that leaves the interpreter's lock free; a future may be
        cancelled."""
        cost = self._cost(constraint)
        if cost.is_refused:
            refused = Compiling()
            refused.set_result(_refusal(constraint, TOO_SLOW))
            return refused
        compiling = self._compiling.get(constraint)
        if compiling is None or compiling.cancelled() or cost.refusal_ended():
            # llguidance recurses, and an overflow would end the process. The first call starts the thread.
            before = threading.stack_size(STACK_BYTES)
            try:
                compiling = self._compiling[constraint] = self._thread.submit(self._compile, constraint)
            finally:
                threading.stack_size(before)
        self._recent.pop(constraint, None)
        self._recent[constraint] = compiling
        if len(self._recent) > MAX_COMPILED:
            del self._recent[next(iter(self._recent))]
        return compiling

    def _compile(self, constraint: Constraint) -> Grammar | UserError:
        """The grammar, or why there is none: a raised error would hold frames as long as the future."""
        start = time.perf_counter()
        try:
            compiled = self._checked(constraint)
        except UserError as error:
            return UserError(error.code, error.message, fix=error.fix)
        except ValueError as error:
            compiled = str(error)
        if isinstance(compiled, Grammar):
            if compiled.notes:
                get_logger(__name__).warning("constraint: %s", "; ".join(compiled.notes))
            if not self._budget.is_short:
                self._thread.submit(self._add_peers, constraint, compiled.peers, self._seconds)
            return compiled
        # Not every C library can; it holds freed memory in pieces otherwise.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None and time.perf_counter() - start > TRIM_SECONDS:
            trim(0)
        return _refusal(constraint, compiled)

    def _cost(self, constraint: Constraint) -> Cost:
        """What the grammar of a constraint costs, of the last ones that came."""
        key = hash(constraint)
        self._costs[key] = found = self._costs.pop(key, None) or Cost(self._budget)
        if len(self._costs) > MAX_COSTS:
            del self._costs[next(iter(self._costs))]
        return found

    def _checked(self, constraint: Constraint) -> Grammar | str:
        """The grammar, or what is wrong with it. Raises ValueError."""
        matcher = self._matcher(constraint)
        peers = deque([(0, matcher.deep_copy())])
        grammar = Grammar(matcher, self._vocab_size, peers, self._cost(constraint))
        if problem := grammar.problem:
            return problem
        grammar.notes, problem = read_warnings(constraint, matcher.get_grammar_warnings())
        if problem:
            return problem
        grammar.charge(grammar.mask_seconds())
        bits = int.from_bytes(grammar.matcher.compute_bitmask(), "little")
        first = (bits & -bits).bit_length() - 1
        # Where no token has the bytes that must come, the mask has tokens of what follows them.
        if grammar.problem or not bits or not grammar.matcher.validate_tokens([first]):
            begun = matcher.compute_ff_bytes().decode(errors="replace")
            return f"no token can begin it ({grammar.problem or f'it begins with {begun!r}'})"
        return grammar

    def _add_peers(self, constraint: Constraint, peers: Peers, seconds: float) -> None:
        """Compile the grammar again, which takes so long, as often as the time allows."""
        for lexer in range(1, min(NUM_PEERS, 1 + int(PEER_SECONDS / seconds))):
            peers.append((lexer, self._matcher(constraint)))

    def _matcher(self, constraint: Constraint) -> Any:
        llguidance, vocabulary = _llguidance(), self._vocabulary
        start, source = time.perf_counter(), _source(constraint, vocabulary, llguidance)
        fewest, maximum = STEP_ITEMS
        limits = llguidance.LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW,
            step_max_items=min(max(ITEMS_BY_LENGTH // len(source), fewest), maximum),
            initial_lexer_fuel=LEXER_WORK[0],
            step_lexer_fuel=LEXER_WORK[1],
        )
        matcher = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=limits)
        self._seconds = time.perf_counter() - start
        return matcher

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        tokenizer, vocab_size, eos_ids = self._tokenizer, self._vocab_size, self._eos_ids
        if tokenizer is None or not eos_ids:
            what = "tokenizer files" if tokenizer is None else "end-of-sequence token"
            raise _unknown_tokens(f"the checkpoint has no {what}")
        llguidance = _llguidance()
        try:
            return Vocabulary(tokenizer, vocab_size, eos_ids, llguidance)
        except ValueError as error:
            raise _unknown_tokens(f"llguidance cannot read the tokenizer: {error}") from error


def _refusal(constraint: Constraint, problem: str) -> UserError:
    return UserError(
        "IDLM-0474",
        f"constraint: this {constraint.kind} cannot be used: {' '.join(problem.split())}",
        fix="correct its text, which the checkpoint's tokens must be able to spell; see "
        "what llguidance supports",
    )


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        raise UserError(
            "IDLM-0476",
            "constraint: answers that match a grammar need llguidance, which is not installed",
            fix=f"install the extra structured: {install_command('structured')}",
        ) from error


def _source(constraint: Constraint, vocabulary: Vocabulary, llguidance: Any) -> str:
    """The constraint in llguidance's own format. Raises ValueError."""
    text = constraint.text
    match constraint.kind:
        case "json_schema" | "json_object":
            schema = text or '{"type": "object"}'
            source = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
        case "choice":
            source = llguidance.grammar_from("lark", "\n".join(["start: answer", *answer_rules(constraint)]))
        case "grammar":
            # llguidance takes a grammar for llama.cpp's unless a line begins with `start:`, not `?start:`.
            notation = "gbnf" if "::=" in LARK.sub("", text) else "lark"
            source = llguidance.grammar_from(notation, vocabulary.with_ids(text))
        case "regex":
            source = llguidance.grammar_from("regex", text)
    return str(source)


def _unknown_tokens(problem: str) -> UserError:
    fix = "leave constraint out, or complete the checkpoint's tokenizer"
    return UserError("IDLM-0475", f"constraint: {problem}", fix=fix)
