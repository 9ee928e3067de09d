"""Text from a trained model: of a run, a checkpoint or an export, for evaluation samples, prompts and conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from multipack.data.header import CHAT_TEMPLATE
from multipack.data.source_document import Part
from multipack.data.tokenizer import Tokenizer
from multipack.models.decoder import Decoder
from multipack.models.families import build_decoder
from multipack.models.generate import Completion, Listener, generate_batch
from multipack.models.sampling import Sampling
from multipack.run import find_run, is_export
from multipack.training.initial import initial_weights

if TYPE_CHECKING:
    from multipack.data.chat import ChatTemplate


def load_run(path: Path) -> tuple[Decoder, Tokenizer]:
    """The model and tokenizer of a run's latest checkpoint, of the checkpoint that `path` names, or of an export.

    Raises:
        FileNotFoundError: there is no run, no complete checkpoint and no export at `path`.
        ValueError: the files do not fit together, or there is no tokenizer among them.
    """
    initial = initial_weights(path)
    if initial.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json: without it nothing can be read or written")
    return build_decoder(initial.shape, dict(initial.state), initial.attention), initial.tokenizer


def load_template(path: Path) -> ChatTemplate:
    """The chat template that a run was trained with, or that an export holds; see `find_template`.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: there is no template; the message says how a run gets one.
    """
    template = find_template(path)
    if template is None:
        raise ValueError(
            f"{path} has no chat template ({CHAT_TEMPLATE}): it was not trained on conversations. Train on records with"
            " `messages` (data.format=chat; data.chat_template says how they are written), or leave --chat away"
        )
    return template


def find_template(path: Path) -> ChatTemplate | None:
    """The chat template of a run, a checkpoint or an export; None = it has none.

    Looked for beside the weights, in the run directory, and in the token store that the run names.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: a file of a template that holds none.
    """
    from multipack.data.chat import ChatTemplate  # training itself needs no templates
    from multipack.data.vocabularies import facts_of_file

    folder = path if is_export(path) else _checkpoint_of(path)
    folders = [folder]
    if not is_export(path):
        folders.append(find_run(path)[0].path)
        data = OmegaConf.load(folder / "config.yaml").data
        if data.source == "store" and data.path:
            folders.append(Path(data.path).expanduser())
    for candidate in folders:
        if (candidate / CHAT_TEMPLATE).is_file():
            return ChatTemplate.from_json((candidate / CHAT_TEMPLATE).read_text(encoding="utf-8"))
    facts = facts_of_file(folder)
    if facts.chat_template:
        return ChatTemplate(facts.chat_template, facts.special_tokens, facts.bos_token, facts.eos_token)
    return None


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    top_p: float = 1.0,
) -> str:
    """What a model writes after `prompt`; its random numbers are its own, so a run's stay untouched.

    Raises:
        ValueError: the prompt has no tokens, or characters that the tokenizer does not know.
    """
    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed)
    return complete_batch(model, tokenizer, [prompt], sampling)[0].text


def complete_batch(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    listener: Listener | None = None,
) -> list[Completion]:
    """What a model writes after each prompt, all of them read and written together.

    Raises:
        ValueError: a prompt has no tokens, or characters that the tokenizer does not know.
    """
    ends = [] if tokenizer.end_id is None else [tokenizer.end_id]
    ids = encode_prompts(tokenizer, prompts)
    return generate_batch(model, ids, sampling, end_ids=ends, tokenizer=tokenizer, listener=listener)


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Tokens of each prompt.

    Raises:
        ValueError: as `complete_batch`; with several prompts it says which one.
    """
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number}: " if len(prompts) > 1 else ""
        try:
            encoded.append(tokenizer.encode(prompt))
        except ValueError as error:
            raise ValueError(f"{which}{error}") from error
        if not encoded[-1]:
            raise ValueError(f"{which}the prompt {prompt!r} has no tokens; give some text to go on from")
    return encoded


class Conversation:
    """A chat with a model that remembers what was said; before each answer all of it is read again, as one document.

    Args:
        model: trained on conversations.
        tokenizer: of the model.
        template: how they were written.
        sampling: how answers are drawn; each turn has a seed of its own.
        system: the system's message; empty = none.

    Attributes:
        messages: what was said so far, as `role` and `content`.
        num_read: tokens that the model was given before its last answer; it sees at most its context of them.

    Raises:
        ValueError: the tokenizer lacks a special token that the template writes.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        sampling: Sampling,
        system: str = "",
    ) -> None:
        self._model, self._tokenizer, self._template, self._sampling = model, tokenizer, template, sampling
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.num_read = 0
        self._ends = set() if tokenizer.end_id is None else {tokenizer.end_id}
        if template.end_of_turn:
            self._ends.update(self._encode((Part(template.end_of_turn, False, is_special=True),)))

    def say(self, text: str, listener: Callable[[str], None] | None = None) -> Completion:
        """The answer to `text`, told to `listener` piece by piece. Both are remembered once it is complete.

        Raises:
            ValueError: the template or the tokenizer refuses the text; the conversation stays as it was.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode(self._template.prompt_parts(asked))
        turn = sum(message["role"] == "user" for message in self.messages)
        (answer,) = generate_batch(
            self._model,
            [ids],
            replace(self._sampling, seed=self._sampling.seed + turn),
            end_ids=self._ends,
            tokenizer=self._tokenizer,
            listener=None if listener is None else lambda _, piece: listener(piece),
        )
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        self.num_read = len(ids)
        return answer

    def _encode(self, parts: Sequence[Part]) -> list[int]:
        (encoded,) = self._tokenizer.encode_parts([parts])
        return [token for tokens, _ in encoded for token in tokens]


def _checkpoint_of(path: Path) -> Path:
    run, named = find_run(path)
    return named or run.latest_checkpoint()
