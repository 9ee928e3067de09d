"""Text from a decoder, one token at a time: prompts are read as packs, and every further token costs one token.

    prompts   A A A A A   B B   C C C        one pack, no padding; keys and values go into a cache
    step 1            A     B       C        from then on a token of every text a pass …
    step 2            A             C        … and texts that have ended are left out

A token sees at most the last `model.shape.context` tokens before it. Beyond that the window slides, and positions with
it: what the cache holds was computed at other positions and from tokens that are no longer seen, so a text that
outgrows the context is read again, whole, for each of its tokens. Results are those of reading everything again all
the time (`use_cache=False`), and do not depend on which prompts stand beside each other.
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
from multipack.data.tokenizer import Tokenizer
from multipack.models.cache import KeyValueCache
from multipack.models.decoder import Decoder
from multipack.models.sampling import Sampling, draw
from multipack.models.text import TextStream

PACK_TOKENS = 16_384
"""Most tokens of prompts that are read as one pack, where they are several."""
MOST_TOGETHER = 64
"""Texts that are written at the same time; more wait until one has ended."""

Reason = Literal["end", "stop", "length"]
Listener = Callable[[int, str], None]
"""`listener(prompt's number, text)`: told what is certain of a text as soon as it is."""


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt.

    Attributes:
        tokens: the new tokens, without an end token, but with those that the stop string is of.
        reason: `end`: the model wrote an end token; `stop`: a stop string; `length`: as many tokens as were asked for.
        text: cut before the stop string; empty where no tokenizer was given.
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
        model: left in the mode (train or eval) in which it came.
        prompt_ids: at least one token. Only the last `model.shape.context` tokens are ever looked at.
        max_tokens: most tokens to add.
        temperature: logits are divided by it; 0 = always the likeliest token.
        top_k: draw among the k likeliest only; 0 = among all.
        end_id: stop at this token, which is not returned.
        generator: a CPU generator to draw from; None = a fresh one with torch's default seed, so that two
            calls give the same. The global generator is never touched.
        vocabulary_size: draw among the first so many tokens only: those that the tokenizer has, where the model's
            vocabulary is larger; None = among all.
        top_p: draw among the fewest likeliest tokens that together have this probability; 1 = among all.
        use_cache: keep keys and values; False = read the whole text again for each token.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a negative option.
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
    tokenizer: Tokenizer | None = None,
    vocabulary_size: int | None = None,
    listener: Listener | None = None,
    use_cache: bool = True,
    together: int = MOST_TOGETHER,
) -> list[Completion]:
    """Continue several prompts together; each as it would be continued alone.

    Args:
        model: left in the mode (train or eval) in which it came.
        prompts: tokens of each, at least one. Only the last `model.shape.context` tokens are ever looked at.
        sampling: how tokens are drawn, and when to stop. Prompt i draws from a generator of seed + i.
        end_ids: tokens that end a text.
        tokenizer: makes text of tokens, which stop strings and a listener need; also says the vocabulary's size.
        vocabulary_size: as in `generate`; None = the tokenizer's, or all.
        listener: told the text of each prompt as it comes.
        use_cache: as in `generate`.
        together: most texts written at the same time, which bounds the cache's memory.

    Returns:
        A completion for each prompt, in their order.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or stop strings or a listener without a tokenizer.
    """
    if tokenizer is None and (sampling.stop or listener is not None):
        raise ValueError("stop strings and a listener need text: give generate_batch a tokenizer")
    if together < 1:
        raise ValueError(f"together must be at least 1 text, got {together}")
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


def single_document(ids: Sequence[int]) -> PackedBatch:
    """A pack of one document, without targets."""
    return _pack([ids])


@dataclass(eq=False)
class _Text:
    """A prompt and what was written after it so far."""

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
        """Its last `count` tokens, or all where it has fewer."""
        missing = count - len(self.tokens)
        return [*self.prompt[-missing:], *self.tokens] if missing > 0 else self.tokens[-count:]

    def take(self, token: int, end_ids: Collection[int], max_tokens: int) -> None:
        """One more token, which may end the text."""
        if token in end_ids:
            self.reason = "end"
        else:
            self.tokens.append(token)
            if self.stream is not None:
                self._tell(self.stream.push(token))
                if self.stream.stopped:
                    self.reason = "stop"
            if self.reason is None and len(self.tokens) >= max_tokens:
                self.reason = "length"
        if self.reason is not None and self.stream is not None:
            self._tell(self.stream.finish())
            if self.stream.stopped:
                self.reason = "stop"

    def completion(self) -> Completion:
        """The result; a text of which nothing was asked has its length."""
        return Completion(
            self.tokens, self.reason or "length", "" if self.stream is None else self.stream.text
        )

    def _tell(self, piece: str) -> None:
        if piece and self.listener is not None:
            self.listener(self.number, piece)


class _Reader:
    """What the model makes of the last token of each text, with a cache of up to `rows` texts or without any."""

    def __init__(self, model: Decoder, rows: int) -> None:
        self.model, self.device = model, model.embedding.weight.device
        self.cache = KeyValueCache(len(model.blocks), rows, model.shape.context)
        self.held: list[_Text] = []
        """The text in each row of the cache: all of its tokens but the newest."""

    def read(self, texts: Sequence[_Text]) -> Tensor:
        """(B, d) the decoder's last hidden state of each text."""
        context = self.model.shape.context
        self._leave_out({text for text in texts if text.length <= context})
        hidden: dict[_Text, Tensor] = {}
        if self.held:
            batch = self.cache.advance([text.tokens[-1] for text in self.held], self.device)
            hidden.update(zip(self.held, self.model.hidden(batch, self.cache), strict=True))
        fresh = [text for text in texts if text not in hidden]
        # What fills the context cannot grow in the cache: its next token slides the window.
        kept = [text for text in fresh if self.cache.rows and text.length < context]
        for pack in _packs(kept, context):
            hidden.update(self._whole(pack, self.cache))
            self.held += pack
        for pack in _packs([text for text in fresh if text not in hidden], context):
            hidden.update(self._whole(pack, None))
        return torch.stack([hidden[text] for text in texts])

    def _whole(self, pack: list[_Text], cache: KeyValueCache | None) -> Iterator[tuple[_Text, Tensor]]:
        """Read texts from their beginnings, or from where the context begins."""
        batch = _pack([text.last(self.model.shape.context) for text in pack]).to(self.device)
        if cache is not None:
            cache.admit(batch)
        ends = torch.tensor(batch.lengths).cumsum(0) - 1
        return zip(pack, self.model.hidden(batch, cache)[ends.to(self.device)], strict=True)

    def _leave_out(self, going_on: set[_Text]) -> None:
        """Free the rows of texts that have ended or outgrown the context; the last row moves there."""
        for row in reversed(range(len(self.held))):
            if self.held[row] not in going_on:
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
    """Continue all texts to their ends, at most `together` at a time, in their order."""
    if not sampling.max_tokens:
        return
    waiting = list(reversed(texts))
    running: list[_Text] = []
    reader = _Reader(model, min(together, len(texts)) if use_cache else 0)
    with _evaluating(model):
        while waiting or running:
            while waiting and len(running) < together:
                running.append(waiting.pop())
            logits = F.linear(reader.read(running), model.output_weight)
            for text, row in zip(running, logits[:, :vocabulary_size].float().cpu(), strict=True):
                text.take(draw(row, sampling, text.generator), end_ids, sampling.max_tokens)
            running = [text for text in running if text.reason is None]


@contextmanager
def _evaluating(model: Decoder) -> Iterator[None]:
    """The model in eval mode; blocks that training compiled run as they were written, or each length would compile."""
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
    """Texts in their order, cut into packs of at most `PACK_TOKENS`; a longer text is a pack of its own."""
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
    none = np.zeros((0, 2), dtype=np.int64)
    made = [Document(np.asarray(ids, dtype=np.uint32), none) for ids in documents]
    return PackedCollator(len(made), max(map(len, documents)))(made)


def _checked(prompt_ids: Sequence[int], model: Decoder) -> list[int]:
    """The tokens of a prompt, all of which the model knows: a GPU would not say which one it does not."""
    prompt, size = [int(token) for token in prompt_ids], model.shape.vocabulary_size
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token (the end token starts a document)")
    if outside := [token for token in prompt if not 0 <= token < size]:
        raise ValueError(
            f"token {outside[0]} is outside the vocabulary of {size:,}: the prompt's tokenizer must be the model's"
        )
    return prompt
