"""Chat to tokens without a model: the renderer protocol and a byte-level one.

Owns how messages become token ids that are only ever appended, never rendered again. Leaves model
tokenizers to the engines that own them.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentgym.types import Message


class Renderer(Protocol):
    """Renders messages as tokens in a way that extending the chat extends the tokens."""

    end_id: int
    """Ends a turn; sampled by the policy, or appended with mask 0 where it was not."""

    def render(self, messages: Sequence[Message], *, open_turn: bool) -> tuple[int, ...]:
        """Tokens that the messages add; `open_turn` appends the header after which the policy writes."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of plain text; never a control token, whatever the text spells."""

    def decode(self, ids_T: Sequence[int]) -> str:
        """The text of sampled tokens, control tokens left out."""


_ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}


class ByteRenderer:
    """UTF-8 bytes as ids 0 to 255, control tokens above, so that text can never spell a control token.

    Example: a user's "hi" with an open turn -> (258, 104, 105, 256, 259).
    """

    end_id = 256

    def render(self, messages: Sequence[Message], *, open_turn: bool) -> tuple[int, ...]:
        """One role token, the bytes, one end token for each message."""
        ids: list[int] = []
        for message in messages:
            ids.append(_ROLES[message.role])
            ids.extend(message.content.encode("utf-8", "surrogatepass"))
            ids.append(self.end_id)
        if open_turn:
            ids.append(_ROLES["assistant"])
        return tuple(ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """The bytes of the text."""
        return tuple(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids_T: Sequence[int]) -> str:
        """The text; bytes cut in the middle of a character are replaced."""
        return bytes(i for i in ids_T if i < 256).decode("utf-8", "replace")
