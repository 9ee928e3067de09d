"""Conversations as records hold them → one form: a list of messages with `role` and `content`.

Two ways of writing them are read, message by message:

    {"role": "user", "content": "Hi"}      content may be a list of {"type": "text", "text": …}
    {"from": "human", "value": "Hi"}       ShareGPT's, whose `human` and `gpt` are user and assistant
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]
"""`role`, `content` (text), and whatever else a template may read: `tool_calls`, `tool_call_id`, `name`, …"""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Names of roles in ShareGPT's files → those of everybody else."""


def read_messages(value: Any, where: str, field: str = "messages", role: str = "") -> list[Message]:
    """The messages of one conversation.

    Args:
        value: a list of messages, one message, or text.
        where: file and line, for errors.
        field: the record's field, for errors.
        role: who says what is text and no message; empty: text is an error.

    Raises:
        ValueError: something that is no message, a role that nobody has, content that is not text.
    """
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not a list of messages")
    return [_message(message, where, f"{field}[{number}]") for number, message in enumerate(messages)]


def _message(value: Any, where: str, field: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {field} is a {type(value).__name__}, not a message with role and content")
    message = {key: entry for key, entry in value.items() if entry is not None}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        message["content"] = message.pop("value", None)
    if "role" not in message:
        raise ValueError(
            f"{where}: {field} has neither `role` nor `from` ({', '.join(value) or 'it is empty'})"
        )
    role = message["role"]
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"{where}: {field} has the role {role!r}; known are {', '.join(ROLES)}")
    message["role"] = role
    message["content"] = _content(message, where, field)
    return message


def _content(message: Message, where: str, field: str) -> str:
    """The text of a message: what a list of texts says, one after the other."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message.get("tool_calls"):
            return ""
        raise ValueError(f"{where}: {field} has no content")
    if not isinstance(content, list):
        raise ValueError(f"{where}: the content of {field} is a {type(content).__name__}, not text")
    texts = []
    for entry in content:
        kind = entry.get("type") if isinstance(entry, dict) else type(entry).__name__
        text = entry.get("text") if isinstance(entry, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"{where}: the content of {field} holds {kind!r}; only 'text' can be trained on")
        texts.append(text)
    return "".join(texts)


def read_tools(value: Any, where: str, field: str = "tools") -> list[Any] | None:
    """The tools that a conversation may call: a list of descriptions, or one written as JSON; None = none.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{where}: field {field!r} is text, but not a list in JSON: {error}") from error
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, list):
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}, not a list of tools")
    return value


def says_something(message: Message) -> bool:
    """Whether a message is an assistant's with text or a call of a tool."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def without_nulls(value: Any) -> Any:
    """`value` without the entries of dictionaries that are None, at any depth.

    Tables have every field in every row: `tool_calls: None` in each message without one. Templates ask whether a
    message *has* tool calls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
