"""One standard term per idea: private words stay out of code, options, errors and documentation.

Names are looked up among the tokens of the code, prose in all text. "Law" is mathematics: the sampling law,
and the folders and commands that test it.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STANDARD_NAMES = {
    "Picture": "DraftLayout",
    "PictureName": "StrideMode",
    "picture": "mode",
    "pictures": "modes",
    "Flight": "InflightStep",
    "flight": "inflight_step",
    "is_back": "is_ready",
    "num_in_flight": "num_inflight",
    "lawless": "nonfinite",
    "Laws": "Probs",
    "laws": "probs",
    "row_laws": "row_probs",
    "Feeding": "KVWritePolicy",
    "feeding": "kv_policy",
    "grain": "block_size",
    "rides": "fused_commit",
    "num_due": "num_computable",
    "num_pending": "num_lookahead_tokens",
    "Pace": "StrideController",
    "FixedPace": "None",
    "AdaptivePace": "StrideController",
    "learn_time": "observe_time",
    "learn_drafts": "observe_drafts",
    "learn_shortage": "observe_out_of_memory",
    "Team": "TensorParallelGroup",
    "team": "group",
    "hire": "create_worker",
    "obey": "worker_loop",
    "LeadWorker": "DriverWorker",
    "seat": "admit",
    "seats": "lanes",
    "seated": "scheduled_new_requests",
    "settle": "commit",
    "resting": "evictable",
    "num_resting": "num_evictable",
    "wake": "acquire",
    "forgets": "invalidate",
    "Kept": "RowSelection",
    "Place": "EngineSpec",
    "keep_rows": "select_rows",
    "fed_rows": "initial_rows",
    "thinned": "sparse",
    "ThinnedKV": "SparseKV",
    "narrowed": "select_plan_rows",
    "BlocksInWork": "ActiveBlocks",
    "open_BW": "is_maskable_BW",
    "Stock": "DraftBuffer",
    "stocks": "draft_buffers",
    "is_fill": "from_verify_rows",
    "Begun": "ResumeState",
    "begun": "resume_state",
    "made_with": "run_config",
    "UNFIT": "MISMATCH",
    "claimed": "exclusive_output",
    "telling_of_disk": "translate_disk_errors",
    "telling_of_path": "translate_path_errors",
    "telling_of_room": "translate_memory_errors",
    "explaining_memory": "explain_out_of_memory",
    "check_room": "check_memory",
    "relieve": "free_cached_memory",
    "Given": "Objective",
    "Fed": "TokenCounts",
    "Seen": "PeerStatus",
    "Beat": "Heartbeat",
    "last_words": "failure_message",
    "moves": "progress_count",
    "dog": "watchdog",
    "SAID_OTHERWISE": "EXCLUDED_KEYS",
    "NO_MATTER": "SPEED_ONLY_KEYS",
    "max_prompt_rows": "max_num_batched_tokens",
    "run_ahead": "num_inflight_steps",
    "on_rejection": "rejection_strategy",
}
CONSTANTS = re.compile(r"(LEAST|MOST)_[A-Z_]+|[A-Z]+_(TO|FOR)_A_[A-Z]+")
SUSPECT = re.compile(rf"\b(?:{'|'.join(STANDARD_NAMES)}|{CONSTANTS.pattern})\b")
PROSE = re.compile(
    r"(?<!<)(?<!</)\b(pictures?|in flight|lawless|grains?|seated|seats|sits down|sat down|whoever|nobody"
    r"|hires?|hired|obeys?|thinned"
    r"|max_prompt_rows|run_ahead|on_rejection)\b(?!>)",
    re.IGNORECASE,
)
LEFT_OUT = (
    "benchmarks/results/",
    "benchmarks/RESULTS.md",
    "recipes/assets/",
    "CHANGELOG.md",
    "tests/repo/test_words.py",
)
# Options that were renamed are known by their old names in one place, which refuses them.
ALLOWED = {"idlm/config/suggest.py": ("max_prompt_rows", "run_ahead", "on_rejection")}


def texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    names = [
        name
        for name in listed
        if name.endswith((".py", ".md", ".yaml", ".sh")) and not name.startswith(LEFT_OUT)
    ]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def private_words(name: str, text: str) -> list[str]:
    """Lines and private words of a file."""
    allowed = ALLOWED.get(name, ())
    found = []
    if name.endswith(".py") and SUSPECT.search(text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_constant = CONSTANTS.fullmatch(token.string) is not None
            if token.type == tokenize.NAME and (token.string in STANDARD_NAMES or is_constant):
                new = STANDARD_NAMES.get(token.string, "MIN, MAX")
                found.append(f"{name}:{token.start[0]}: {token.string} -> {new}")
    for number, line in enumerate(text.splitlines(), start=1):
        found += [f"{name}:{number}: {word[0]}" for word in PROSE.finditer(line) if word[0] not in allowed]
    return found


def test_no_private_words() -> None:
    found, paths = [], texts()
    assert len(paths) > 300, "git lists the files to check"
    for path in paths:
        found += private_words(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def test_the_check_finds_words() -> None:
    assert private_words("x.py", "seated = picture\n") and private_words("x.md", "Whoever is seated")
    assert not private_words("x.py", "mode = 'sampling law'\n")
