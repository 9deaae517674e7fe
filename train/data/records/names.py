"""The names that data sets use for the parts of a record and of a turn."""

from __future__ import annotations

from idlm.text.thoughts import REASONING_KEYS

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""Roles of turns, and the role of the message that each becomes."""
CALL_ROLES = ("function_call", "tool_call")
"""Roles of turns whose text is the JSON of one call or of a list of calls."""
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")
TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of those parts of a content that are text."""

SYSTEM_KEYS = ("system", "system_prompt", "system_message", "sys_prompt", "system_instruction")
TOOLS_KEYS = ("tools", "functions")
HISTORY_KEY = "history"
TEMPLATE_KEYS = ("enable_thinking", "reasoning_effort")
"""Keys of a record that are variables of the chat template, as all keys in `TEMPLATE_DICT` are."""
TEMPLATE_DICT = "chat_template_kwargs"
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
EXTRA_KEYS = (*SYSTEM_KEYS, *TOOLS_KEYS, *("history", "chat_template_kwargs"), *TEMPLATE_KEYS, *MEDIA_KEYS)
"""Parts of a conversation that a record of any shape may have beside its turns, and what no model reads."""

UNTRAINED_BY = {
    "weight": 0,
    "train": 0,
    "training": 0,
    "trainable": 0,
    "trained": 0,
    "train_on_turn": 0,
    "supervised": 0,
    "calculate_loss": 0,
    "compute_loss": 0,
    "loss": 0,
    "loss_mask": 0,
    "loss_scale": 0,
    "loss_weight": 0,
    "mask": 1,
    "masked": 1,
    "is_masked": 1,
    "ignore_loss": 1,
    "no_loss": 1,
    "is_trained": 0,
    "is_train": 0,
    "do_train": 0,
    "learn": 0,
}
"""Weights of turns, and the value with which a turn is context alone."""
LISTED_WEIGHTS = UNTRAINED_BY | {
    "weights": 0,
    "loss_masks": 0,
    "loss_weights": 0,
    "train_mask": 0,
    "masks": 1,
}
"""Weights of a record: a list with a value for each turn, or one value."""
TOKEN_WEIGHTS = ("train_detail", "training_detail")
"""Weights of parts of a turn."""

MESSAGE_KEYS = ("role", "content", "tool_calls", *REASONING_KEYS)
"""Keys of a message that are rendered, or refused where the template leaves them out."""
CONTEXT_KEYS = ("input", "context")
"""What follows an instruction in the prompt."""
QUESTION_PARTS = (*CONTEXT_KEYS, "passage", "document", "documents", "choices", "options")
"""What a question that is not called prompt may need to be understood."""

PAIR_ALIASES = (
    ("prompt", "output"),
    ("prompt", "answer"),
    ("question", "answer"),
    ("question", "response"),
    ("question", "solution"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("problem", "answer"),
    ("problem", "response"),
    ("input", "output"),
    ("inputs", "targets"),
    ("user", "assistant"),
)
"""Other names of a prompt and its response."""
LABEL_KEY = "label"
"""Of a pair: false where its response is one that is not wanted."""
PROMPT_KEYS = ("prompt", "messages", "conversations", "question", "instruction")
"""What a preferred answer may follow."""
TEXT_EXTRAS = ("role", *(key for key in EXTRA_KEYS if key not in MEDIA_KEYS))
"""Keys by which a record with a text is a turn of a conversation."""
