"""OpenAI's completions and chat completions as JSON: what an answer holds, whole or in pieces, and an error."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from .completion import Ended, NewToken
from .protocol import Wanted
from .text import Text

Json = dict[str, Any]


class Answer:
    """What is said about a request's completions.

    Args:
        model: the served model's name. text: its vocabulary. wanted: the request.
    """

    prefix, whole_object, part_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, text: Text, wanted: Wanted) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._same = {"id": self.id, "created": int(time.time()), "model": model}
        self._text, self._wanted = text, wanted
        self._top = wanted.requests[0].logprobs
        self._offsets = [0] * len(wanted.requests)  # characters of each choice before its next token

    def opening(self) -> list[Json]:
        """What a stream begins with."""
        return [self._chunk(i, said, []) for i, said in enumerate(self._wanted.echo) if said]

    def part(self, index: int, text: str, tokens: Sequence[NewToken], reason: str | None = None) -> Json:
        """A piece of a completion in a stream; `reason`: why it ended, None while it goes on."""
        return self._chunk(index, text, tokens, reason)

    def whole(self, texts: Sequence[str], tokens: Sequence[Sequence[NewToken]], ends: Sequence[Ended]) -> Json:
        """All completions, whole."""
        choices = [
            self._choice(i, self._wanted.echo[i] + texts[i], tokens[i], end.reason) for i, end in enumerate(ends)
        ]
        return {**self._same, "object": self.whole_object, "choices": choices, "usage": self._usage(ends)}

    def usage(self, ends: Sequence[Ended]) -> Json:
        """The last piece of a stream, if asked for."""
        return {**self._same, "object": self.part_object, "choices": [], "usage": self._usage(ends)}

    def _usage(self, ends: Sequence[Ended]) -> Json:
        """Numbers of tokens; a prompt that is completed several times counts once."""
        each = ends[:: max(1, len(ends) // self._wanted.prompts)]
        prompt, new = sum(end.prompt_tokens for end in each), sum(end.completion_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(end.reused_tokens for end in each)},
        }

    def _chunk(self, index: int, text: str, tokens: Sequence[NewToken], reason: str | None = None) -> Json:
        choice = self._choice(index, text, tokens, reason)
        return {**self._same, "object": self.part_object, "choices": [choice]}

    def _choice(self, index: int, text: str, tokens: Sequence[NewToken], reason: str | None) -> Json:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if self._top is not None:
            choice["logprobs"] = self._logprobs(index, tokens)
        return choice | {"token_ids": [token.token for token in tokens]}

    def _logprobs(self, index: int, tokens: Sequence[NewToken]) -> Json:
        out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if self._top else None, "text_offset": []}
        for token in tokens:
            out["tokens"].append(self._text.token(token.token)[0])
            out["token_logprobs"].append(token.said.logprob)
            out["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(token.text)
            if self._top:
                likely: dict[str, float] = {}
                for other, logprob in (*token.said.top, (token.token, token.said.logprob)):
                    likely.setdefault(self._text.token(other)[0], logprob)  # of two that read alike the likelier
                out["top_logprobs"].append(likely)
        return out


class ChatAnswer(Answer):
    """The same about chat completions."""

    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        empty = {
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [],
        }
        choices = [{"index": i, **empty} for i in range(len(self._wanted.requests))]
        return [{**self._same, "object": self.part_object, "choices": [choice]} for choice in choices]

    def part(self, index: int, text: str, tokens: Sequence[NewToken], reason: str | None = None) -> Json:
        chunk = super().part(index, text, tokens, reason)
        message = chunk["choices"][0].pop("message")
        chunk["choices"][0]["delta"] = {"content": message["content"]} if tokens or text else {}
        return chunk

    def _choice(self, index: int, text: str, tokens: Sequence[NewToken], reason: str | None) -> Json:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if self._top is None else {"content": [*map(self._one, tokens)], "refusal": None},
            "finish_reason": reason,
            "token_ids": [token.token for token in tokens],
        }

    def _one(self, token: NewToken) -> Json:
        top = [self._named(other, logprob) for other, logprob in token.said.top]
        return {**self._named(token.token, token.said.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> Json:
        name, data = self._text.token(token)
        return {"token": name, "logprob": logprob, "bytes": None if data is None else list(data)}


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """An error's JSON."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
