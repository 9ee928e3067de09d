"""Generation with a key-value cache: prompts are read as packs, and each step computes one new token per text.

    prompts   A A A A A   B B   C C C        one pack without padding; keys and values go into a cache
    step 1            A     B       C        then one token of every text per pass …
    step 2            A             C        … until the text ends

A token sees at most the last `model.shape.context` tokens. In a longer text the context window moves, and all positions
change with it, so cached keys are invalid: for each further token the last `context` tokens are read again. Results
equal those without a cache (`use_cache=False`) and do not depend on which prompts are generated together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multipack.data.batch import PackedBatch
from multipack.data.collate import PackedCollator
from multipack.data.documents import Document
from multipack.models.decoder import Decoder
from multipack.models.kv_cache import KeyValueCache
from multipack.models.sampling import Sampling, TextDecoder, TextStream, draw

PACK_TOKENS = 16_384
"""Maximum number of tokens of a pack of several prompts."""
MOST_TOGETHER = 64
"""Default maximum number of texts generated at the same time; others wait until one ends."""

Reason = Literal["end", "stop", "length"]
Listener = Callable[[int, str], None]
"""`listener(index of the prompt, new text)`, called whenever new tokens decode to text."""


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        tokens: the new tokens, without an end token, but with those of a stop string.
        reason: what ended it: `end`: an end token; `stop`: a stop string; `length`: the maximum number of tokens.
        text: the decoded tokens up to the stop string; empty without a tokenizer.
    """

    tokens: list[int]
    reason: Reason
    text: str = ""


def generate(
    model: Decoder,
    prompt_ids: list[int],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    end_id: int | None = None,
    generator: torch.Generator | None = None,
    vocabulary_size: int | None = None,
    top_p: float = 1.0,
    use_cache: bool = True,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: the decoder; its mode (train or eval) is restored.
        prompt_ids: at least one token; only the last `model.shape.context` are used.
        max_tokens: maximum number of new tokens.
        temperature: logits are divided by it; 0 = the most likely token (greedy).
        top_k: draw among the k most likely tokens; 0 = all.
        end_id: stop at this token, which is not returned.
        generator: CPU generator to draw from; None = a new one with torch's default seed, so that two calls return
            the same. The global generator is not used.
        vocabulary_size: draw among the first tokens only, if the tokenizer has fewer than the model; None = all.
        top_p: draw among the fewest most likely tokens that together have this probability; 1 = all.
        use_cache: keep keys and values; False = read the whole text again for each token.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: the prompt is empty, a token is outside the vocabulary, or an option is out of range.
    """
    sampling = Sampling(max_tokens, temperature, top_k, top_p)
    text = _Text(0, _checked(prompt_ids, model), generator if generator is not None else torch.Generator())
    ends = () if end_id is None else (end_id,)
    _write(model, [text], sampling, ends, vocabulary_size, use_cache, together=1)
    return text.tokens


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    end_ids: Collection[int] = (),
    tokenizer: TextDecoder | None = None,
    vocabulary_size: int | None = None,
    listener: Listener | None = None,
    use_cache: bool = True,
    together: int = MOST_TOGETHER,
) -> list[Completion]:
    """Continue several prompts together, each exactly as alone.

    Args:
        model: the decoder; its mode (train or eval) is restored.
        prompts: token ids of each prompt, at least one; only the last `model.shape.context` are used.
        sampling: how tokens are drawn, and when to stop.
        end_ids: tokens that end a text.
        tokenizer: decodes tokens; required by stop strings and by a listener.
        vocabulary_size: as in `generate`; None = the tokenizer's, or all without a tokenizer.
        listener: called with new text of each prompt.
        use_cache: as in `generate`.
        together: maximum number of texts at the same time, which bounds the cache's memory.

    Returns:
        One completion per prompt, in their order.

    Raises:
        ValueError: a prompt is empty, a token is outside the vocabulary, `together` is below 1, or there are stop
            strings or a listener without a tokenizer.
    """
    if tokenizer is None and (sampling.stop or listener is not None):
        raise ValueError("stop strings and a listener need a tokenizer: pass tokenizer=")
    if together < 1:
        raise ValueError(f"together must be at least 1, got {together}")
    if vocabulary_size is None and tokenizer is not None:
        vocabulary_size = tokenizer.vocabulary_size
    texts = [
        _Text(
            number,
            _checked(prompt, model),
            sampling.generator(number),
            None if tokenizer is None else TextStream(tokenizer, prompt, sampling.stop),
            listener,
        )
        for number, prompt in enumerate(prompts)
    ]
    _write(model, texts, sampling, end_ids, vocabulary_size, use_cache, together)
    return [text.completion() for text in texts]


@dataclass(eq=False)
class _Text:
    """A prompt and its continuation so far."""

    number: int
    prompt: list[int]
    generator: torch.Generator
    stream: TextStream | None = None
    listener: Listener | None = None
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def last(self, count: int) -> list[int]:
        """The last `count` tokens, or all if there are fewer."""
        missing = count - len(self.tokens)
        return [*self.prompt[-missing:], *self.tokens] if missing > 0 else self.tokens[-count:]

    def take(self, token: int, end_ids: Collection[int], max_tokens: int) -> None:
        """Add a token, which may end the text."""
        if token in end_ids:
            self.reason = "end"
        else:
            self.tokens.append(token)
            if self.stream is not None:
                self._notify(self.stream.push(token))
                if self.stream.stopped:
                    self.reason = "stop"
            if self.reason is None and len(self.tokens) >= max_tokens:
                self.reason = "length"
        if self.reason is not None and self.stream is not None:
            self._notify(self.stream.finish())
            if self.stream.stopped:
                self.reason = "stop"

    def completion(self) -> Completion:
        """The result so far; its reason is `length` if the text has not ended."""
        return Completion(
            self.tokens, self.reason or "length", "" if self.stream is None else self.stream.text
        )

    def _notify(self, piece: str) -> None:
        if piece and self.listener is not None:
            self.listener(self.number, piece)


class _Runner:
    """Runs the model on texts, with a key-value cache for up to `rows` texts; 0 = no cache."""

    def __init__(self, model: Decoder, rows: int) -> None:
        self.model, self.device = model, model.embedding.weight.device
        self.cache = KeyValueCache(len(model.blocks), rows, model.shape.context)
        self.held: list[_Text] = []
        """The text in each row of the cache, which holds all of its tokens except the newest."""

    def read(self, texts: Sequence[_Text]) -> Tensor:
        """(B, d) final hidden states of the last tokens of B texts."""
        context = self.model.shape.context
        self._evict({text for text in texts if text.length <= context})
        hidden: dict[_Text, Tensor] = {}
        if self.held:
            batch = self.cache.advance([text.tokens[-1] for text in self.held], self.device)
            hidden.update(zip(self.held, self.model.hidden(batch, self.cache), strict=True))
        fresh = [text for text in texts if text not in hidden]
        # A text as long as the context cannot grow in the cache: its next token moves the context window.
        kept = [text for text in fresh if self.cache.rows and text.length < context]
        for pack in _packs(kept, context):
            hidden.update(self._whole(pack, self.cache))
            self.held += pack
        for pack in _packs([text for text in fresh if text not in hidden], context):
            hidden.update(self._whole(pack, None))
        return torch.stack([hidden[text] for text in texts])

    def _whole(self, pack: list[_Text], cache: KeyValueCache | None) -> Iterator[tuple[_Text, Tensor]]:
        """Read the last `context` tokens of texts as one pack; pair each text with its last hidden state (d,)."""
        batch = _pack([text.last(self.model.shape.context) for text in pack]).to(self.device)
        if cache is not None:
            cache.admit(batch)
        ends = torch.tensor(batch.lengths).cumsum(0) - 1
        return zip(pack, self.model.hidden(batch, cache)[ends.to(self.device)], strict=True)

    def _evict(self, kept: set[_Text]) -> None:
        """Free the rows of texts that have ended or outgrown the context."""
        for row in reversed(range(len(self.held))):
            if self.held[row] not in kept:
                self.cache.remove(row)
                self.held[row] = self.held[-1]
                self.held.pop()


@torch.no_grad()
def _write(
    model: Decoder,
    texts: Sequence[_Text],
    sampling: Sampling,
    end_ids: Collection[int],
    vocabulary_size: int | None,
    use_cache: bool,
    together: int,
) -> None:
    """Continue all texts until they end, at most `together` at a time, beginning with the first."""
    if not sampling.max_tokens:
        return
    waiting = list(reversed(texts))
    running: list[_Text] = []
    runner = _Runner(model, min(together, len(texts)) if use_cache else 0)
    with _evaluating(model):
        while waiting or running:
            while waiting and len(running) < together:
                running.append(waiting.pop())
            logits = F.linear(runner.read(running), model.output_weight)
            for text, row in zip(running, logits[:, :vocabulary_size].float().cpu(), strict=True):
                text.take(draw(row, sampling, text.generator), end_ids, sampling.max_tokens)
            running = [text for text in running if text.reason is None]


@contextmanager
def _evaluating(model: Decoder) -> Iterator[None]:
    """Context in eval mode; compiled blocks run uncompiled, because torch.compile would recompile for each length."""
    was_training = model.training
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    eager: AbstractContextManager[object] = nullcontext()
    if compiled:
        eager = torch.compiler.set_stance("force_eager")
    model.eval()
    try:
        with eager:
            yield
    finally:
        model.train(was_training)


def _packs(texts: Sequence[_Text], context: int) -> Iterator[list[_Text]]:
    """Texts in their order, in packs of at most `PACK_TOKENS`; a longer text is a pack of its own."""
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


def _pack(documents: Sequence[Sequence[int]]) -> PackedBatch:
    """A pack without targets."""
    no_targets = np.zeros((0, 2), dtype=np.int64)
    pieces = [Document(np.asarray(ids, dtype=np.uint32), no_targets) for ids in documents]
    return PackedCollator(len(pieces), max(map(len, documents)))(pieces)


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
