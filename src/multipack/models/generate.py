"""Generation with a key-value cache: prompts are processed as packs, then each step computes one token per text.

    prefill   A A A A A   B B   C C C        one pack without padding; keys and values go into a cache
    step 1            A     B       C        then one token of every text per pass …
    step 2            A             C        … until the text ends

A token sees at most the last `model.shape.context` tokens. In a longer text all positions change with each token, so
cached keys are invalid: for each further token the last `context` tokens are computed again. Results are the same
without a cache (`use_cache=False`) and do not depend on which prompts are generated together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.packs.collate import PackedCollator
from multipack.data.views.documents import Document
from multipack.models.decoder import Decoder
from multipack.models.kv_cache import KeyValueCache
from multipack.models.sampling import Sampling, TextDecoder, TextStream, draw
from multipack.ops.logits import soft_capped

PACK_TOKENS = 16_384
"""Maximum number of tokens of a pack of several prompts."""
MAX_TEXTS = 64
"""Default maximum number of texts generated at the same time; others wait until one ends."""

Reason = Literal["end", "stop", "length"]
Listener = Callable[[int, str], None]
"""`listener(index of the prompt, new text)`, called whenever new tokens decode to text."""


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        tokens: the new tokens, without an end token, but with the tokens of a stop string.
        reason: what ended it: `end`: an end token; `stop`: a stop string; `length`: the maximum number of tokens.
        text: the decoded tokens up to the stop string; empty without a tokenizer.
    """

    tokens: list[int]
    reason: Reason
    text: str = ""


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    end_ids: Collection[int] = (),
    tokenizer: TextDecoder | None = None,
    vocabulary_size: int | None = None,
    listener: Listener | None = None,
    use_cache: bool = True,
    together: int = MAX_TEXTS,
) -> list[Completion]:
    """Continue prompts together, each exactly as alone. torch's global random generator is not used.

    Args:
        model: the decoder; its mode (train or eval) is restored.
        prompts: token ids of each prompt, at least one; only the last `model.shape.context` are used.
        sampling: how tokens are drawn, and when to stop.
        end_ids: tokens that end a text.
        tokenizer: decodes tokens; required by stop strings and by a listener.
        vocabulary_size: draw among the first tokens only; None = the tokenizer's, or all without a tokenizer.
        listener: called with new text of each prompt.
        use_cache: keep keys and values; False = compute the whole text again for each token.
        together: maximum number of texts at the same time, which bounds the cache's memory.

    Returns:
        One completion per prompt, in their order.

    Raises:
        ValueError: a prompt is empty, a token is outside the vocabulary, `together` is below 1, there are stop strings
            or a listener without a tokenizer, or the model has no logits.
    """
    if model.shape.scores:
        raise ValueError(
            "this model has scores instead of logits (model.scores=1, a reward model), and generates no text: export it"
            " for AutoModelForSequenceClassification"
        )
    if tokenizer is None and (sampling.stop or listener is not None):
        raise ValueError("stop strings and a listener need a tokenizer: pass tokenizer=")
    if together < 1:
        raise ValueError(f"together must be at least 1, got {together}")
    if vocabulary_size is None and tokenizer is not None:
        vocabulary_size = tokenizer.vocabulary_size
    texts = []
    for number, prompt in enumerate(prompts):
        text = _Text(_checked(prompt, model), sampling.generator(number))
        if tokenizer is not None:
            text.stream = TextStream(tokenizer, prompt, sampling.stop)
        if listener is not None:
            text.listener = partial(listener, number)
        texts.append(text)
    waiting = deque(texts if sampling.max_tokens else ())
    running: list[_Text] = []
    with _evaluating(model):
        runner = _Runner(model, min(together, len(texts)) if use_cache else 0)
        while waiting or running:
            while waiting and len(running) < together:
                running.append(waiting.popleft())
            rows = F.linear(runner.last_hidden(running), model.output_weight)
            logits = soft_capped(rows, model.shape.logit_cap)
            for text, row in zip(running, logits[:, :vocabulary_size].float().cpu(), strict=True):
                text.take(draw(row, sampling, text.generator), end_ids, sampling.max_tokens)
            running = [text for text in running if text.reason is None]
    return [
        Completion(text.tokens, text.reason or "length", text.stream.text if text.stream else "")
        for text in texts
    ]


@dataclass(eq=False)
class _Text:
    """A prompt and its continuation so far."""

    prompt: list[int]
    generator: torch.Generator
    stream: TextStream | None = None
    listener: Callable[[str], None] | None = None
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def take(self, token: int, end_ids: Collection[int], max_tokens: int) -> None:
        """Add a token, unless it is an end token; set `reason` if the text ends, and call the listener."""
        pieces: list[str] = []
        if token in end_ids:
            self.reason = "end"
        else:
            self.tokens.append(token)
            pieces += [self.stream.push(token)] if self.stream else []
            if len(self.tokens) >= max_tokens:
                self.reason = "length"
        if self.stream and self.reason is not None:
            pieces.append(self.stream.finish())
        if self.stream and self.stream.stopped:
            self.reason = "stop"
        for piece in pieces:
            if piece and self.listener is not None:
                self.listener(piece)


class _Runner:
    """Runs the model on texts, with a key-value cache for up to `rows` texts; 0 = no cache."""

    def __init__(self, model: Decoder, rows: int) -> None:
        self.model, self.context = model, model.shape.context
        self.cache = KeyValueCache(model.shape, rows, model.embedding.weight)
        self.cached: list[_Text] = []
        """The text in each row of the cache, which has all of its tokens except the newest."""

    def last_hidden(self, texts: Sequence[_Text]) -> Tensor:
        """(B, d) final hidden states of the last tokens of B texts."""
        # Free the rows of texts that ended or outgrew the context, or whose length changes all rotations from here on.
        shape, last = self.model.shape, self.context
        limit = shape.rotation_limit
        changes = limit.tokens + 1 if limit and limit.rope_type == "longrope" else 0
        kept = {text for text in texts if text.length <= last and text.length != changes}
        for row in reversed(range(len(self.cached))):
            if self.cached[row] not in kept:
                self.cache.remove(row)
                self.cached[row] = self.cached[-1]
                self.cached.pop()
        hidden: dict[_Text, Tensor] = {}
        if self.cached:
            batch = self.cache.advance([text.tokens[-1] for text in self.cached])
            hidden.update(zip(self.cached, self.model.hidden(batch, self.cache), strict=True))
        # A text as long as the context is not cached: its next token changes all positions.
        new: dict[bool, list[_Text]] = {True: [], False: []}
        for text in texts:
            if text not in hidden:
                new[self.cache.rows > 0 and text.length < self.context].append(text)
        for is_cached, several in new.items():
            for pack in _packs(several, self.context):
                hidden.update(zip(pack, self._prefill(pack, is_cached), strict=True))
                self.cached += pack if is_cached else []
        return torch.stack([hidden[text] for text in texts])

    def _prefill(self, pack: list[_Text], is_cached: bool) -> Tensor:
        """(B, d) final hidden states of the last tokens of texts, by one pass over their last `context` tokens."""
        none = np.zeros((0, 2), dtype=np.int64)
        tokens = [np.asarray((text.prompt + text.tokens)[-self.context :], dtype=np.uint32) for text in pack]
        batch = PackedCollator(len(pack), max(map(len, tokens)))([Document(ids, none) for ids in tokens])
        batch = batch.to(self.model.embedding.weight.device)
        if is_cached:
            self.cache.admit(batch)
        ends = torch.tensor(batch.lengths, device=batch.input_ids.device).cumsum(0) - 1
        return self.model.hidden(batch, self.cache if is_cached else None)[ends]


@contextmanager
def _evaluating(model: Decoder) -> Iterator[None]:
    """Context in eval mode; compiled blocks run uncompiled, because torch.compile would recompile for each length."""
    was_training = model.training
    eager: AbstractContextManager[object] = nullcontext()
    if any(module._compiled_call_impl is not None for module in model.modules()):
        eager = torch.compiler.set_stance("force_eager")
    model.eval()
    try:
        with eager:
            yield
    finally:
        model.train(was_training)


def _packs(texts: Sequence[_Text], context: int) -> Iterator[list[_Text]]:
    """Texts in their order, in packs of at most `PACK_TOKENS` tokens; a longer text is a pack of its own."""
    pack: list[_Text] = []
    tokens = 0
    for text in texts:
        size = min(text.length, context)
        if pack and tokens + size > PACK_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append(text)
        tokens += size
    if pack:
        yield pack


def _checked(prompt_ids: Sequence[int], model: Decoder) -> list[int]:
    """The prompt's tokens as integers, checked here because an index error on a GPU would not name the token."""
    prompt, size = [int(token) for token in prompt_ids], model.shape.vocabulary_size
    if not prompt:
        raise ValueError("the prompt is empty: pass at least one token (the end token starts a document)")
    if outside := [token for token in prompt if not 0 <= token < size]:
        raise ValueError(
            f"token {outside[0]} is outside the vocabulary of {size:,}: use the model's tokenizer"
        )
    return prompt
