"""The chat template of a run, and whether its documents are written by it."""

from __future__ import annotations

from pathlib import Path

from multipack.data.corpus import Corpus
from multipack.data.tokenizer import load_tokenizer
from multipack.training.inference import find_template
from multipack.training.run_config import Config


def chat_template_of(corpus: Corpus, folder: Path | None) -> str:
    """The chat template of the documents, or of the checkpoint or export in `folder`; empty if neither has one."""
    if corpus.chat_template or folder is None:
        return corpus.chat_template
    template = find_template(folder)
    return template.to_json() if template else ""


def outside_template(config: Config, corpus: Corpus, template: str) -> list[str]:
    """A note if prompts and answers are text, though the initial weights or the tokenizer have a chat template."""
    documents = corpus.train if len(corpus.train) else corpus.validation
    if corpus.chat_template or config.data.source == "stdlib" or not len(documents):
        return []
    if not (documents.store.has_pairs or documents.prompt_length(0)):
        return []
    if not template and (not config.tokenizer.path or not load_tokenizer(config.tokenizer).chat_template):
        return []
    where = "when the store is prepared" if config.data.source in ("store", "mixture") else "here"
    return [
        "prompts and answers are trained as text, outside of the chat template that the weights or the tokenizer have:"
        f" data.as_chat=true {where} writes them as turns of it"
    ]
