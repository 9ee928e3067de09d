"""Mutants of files that other tools wrote, and of damaged runs: refused in one line, or read as the tool reads them.

`MUTANTS=10000 make drills` tries so many in all (1,000 if the variable is not set), and `SEED=2` draws others. Silently
different, and so lost, is a mutant that is accepted and

    config.json of model=hf:, adapters    whose logits are not those of transformers or peft from the same folder
    tokenizers                            whose tokens are not those of the tokenizers library
    records                               that changes the documents of other records, or ends data.broken=skip
    import-config                         with a key that is neither honored nor named, or other settings in its YAML
    settings                              with a value that the configuration does not have

Weights in GGUF files have no checksum, and reports show what they read: there the outcome is only counted.
"""

import contextlib
import gzip
import json
import os
import random
import shutil
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
import yaml
from mutation import of_bytes, of_json, of_safetensors, of_text, of_tree

from hf_models import MORE, SIZES
from multipack.cli import app
from multipack.data.text.data_config import DataConfig
from multipack.data.text.sources import Source
from multipack.data.text.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    load_tokenizer,
    train_bpe,
)
from multipack.hub import model_folder
from multipack.imports.imported import import_axolotl
from multipack.models.decoder import Decoder
from multipack.models.foreign import foreign_shape, open_foreign
from multipack.models.probe_batch import packed_batch
from multipack.training.foreign_checks import check_isolated
from multipack.training.inference import load_model
from multipack.training.run_config import compose, compose_run
from multipack.training.train import train
from multipack.words import read_yaml

transformers = pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
pytestmark = pytest.mark.timeout(7200)
MUTANTS = int(os.environ.get("MUTANTS", "1000"))
TOKENS = [5, 9, 70, 200, 3, 3, 17]
LARGE = 20_000_000
TEXT = "some text, é\n\n  two  spaces <|endoftext|>"

Surface = namedtuple("Surface", "share file mutations read", defaults=())
"""Share of all mutants, the file, functions that make mutants of its content, and the function that reads it."""


class SilentlyDifferent(Exception):
    pass


def check_equal(found, expected, what):
    if found != expected:
        raise SilentlyDifferent(f"{what}: {found!r:.80} instead of {expected!r:.80}")


def check_close(found, expected, what):
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise SilentlyDifferent(f"{what}: {(found - expected).abs().max():.3g}")


# --- models -------------------------------------------------------------------------------------------


def foreign_model(kind):
    def make(folder):
        settings = transformers.CONFIG_MAPPING[kind](**{**SIZES, **MORE.get(kind, {})}).to_dict()
        file = folder / "config.json"
        file.write_text(json.dumps(settings))
        return Surface(0.024, file, [of_json, of_json, of_bytes], lambda: foreign_logits(folder))

    return make


def foreign_logits(folder):
    """Logits with random weights, compared with those of transformers; what it cannot compute has none."""
    shape = foreign_shape(str(folder))
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    make = transformers.AutoModelForCausalLM.from_config
    with contextlib.suppress(Exception), torch.device("meta"):
        # Another number of layers, or transformers' default of a removed size: random weights take minutes.
        if shape.layers > 100 or make(config.get_text_config()).num_parameters() > LARGE:
            return "large"
    model, read = Decoder(shape), open_foreign(shape, seed=0)
    model.load_state_dict({name: read(name) for name, _ in model.named_parameters()})
    torch.manual_seed(0)
    theirs = make(config.get_text_config()).eval()
    with torch.no_grad():
        try:
            expected = theirs(torch.tensor([TOKENS]), use_cache=False).logits[0].float()
        except Exception:
            return "fails in transformers, too"
        found = model.eval().logits(packed_batch([TOKENS]))
    try:
        check_close(found, expected, "logits")
    except SilentlyDifferent:
        check_isolated(shape, torch.device("cpu"))  # a run begins with it
        raise
    return found.shape, round(float(found.double().abs().sum()), 3)


def gguf_file(folder):
    from test_gguf import write

    pytest.importorskip("gguf")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    vocabulary = json.loads(byte_tokenizer().to_json())["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), "ab", "<|endoftext|>"]
    tokens += [f"<|{number}|>" for number in range(264 - len(tokens))]
    file = folder / "tiny.gguf"
    write(file, model, tokens, ["a b"])
    begin = file.read_bytes().rfind(b"output_norm.weight") + 64

    def of_header(content, draw):
        """Damage to the settings, the lists of tokens and the table of tensors; half of it to numbers."""
        header = bytearray(content[:begin])
        if draw.random() < 0.5:
            return of_bytes(bytes(header), draw) + content[begin:]
        at = draw.randrange(8, begin - 8)
        header[at : at + 8] = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, 10**6)).to_bytes(8, "little")
        return bytes(header) + content[begin:]

    def read():
        shutil.rmtree(folder / "cache", ignore_errors=True)
        found = model_folder(str(file), "train.init_from")
        with torch.no_grad():
            logits = load_model(found).logits(packed_batch([[5, 9, 70, 3]]))
        return round(float(logits.double().abs().sum()), 3), Tokenizer.load(found).encode(TEXT)

    return Surface(0.03, file, [of_header, of_header, of_bytes], read)


def adapter(name):
    """One of the files of an adapter."""

    def make(folder):
        peft = pytest.importorskip("peft")
        sizes = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        base.save_pretrained(folder / "base")
        byte_tokenizer().save(folder / "base" / "tokenizer.json")
        targets = ["q_proj", "v_proj", "down_proj"]
        made = peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(base, made)
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        wrapped.get_base_model().config.name_or_path = str(folder / "base")
        wrapped.save_pretrained(folder / "adapter")
        config = folder / "adapter" / "adapter_config.json"
        config.write_text(
            json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(folder / "base")})
        )
        mutations = [of_json, of_json, of_bytes] if name.endswith(".json") else [of_safetensors, of_bytes]

        def read():
            with torch.no_grad():
                found = load_model(folder / "adapter").logits(packed_batch([TOKENS]))
            try:
                again = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
                theirs = peft.PeftModel.from_pretrained(again, folder / "adapter").eval()
            except Exception:
                return "peft refuses it"
            with torch.no_grad():
                check_close(found, theirs(torch.tensor([TOKENS]), use_cache=False).logits[0], "logits")
            return round(float(found.double().abs().sum()), 3)

        return Surface(0.06, folder / "adapter" / name, mutations, read)

    return make


# --- text ---------------------------------------------------------------------------------------------


def _llama(fields):
    """Spaces to underscores, in front too, as in Llama 2."""
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    fields["normalizer"], fields["pre_tokenizer"] = {"type": "Sequence", "normalizers": steps}, None
    fields["model"].update(byte_fallback=True, unk_token="<|endoftext|>", fuse_unk=True)
    undone = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    undone += [
        {"type": kind} | more
        for kind, more in (
            ("ByteFallback", {}),
            ("Fuse", {}),
            ("Strip", {"content": " ", "start": 1, "stop": 0}),
        )
    ]
    fields["decoder"] = {"type": "Sequence", "decoders": undone}


def _unigram(fields):
    pieces = [["<unk>", 0.0], ["▁", -2.0], *([chr(code), -5.0 - code / 100] for code in range(33, 256))]
    fields["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    fields["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": True,
    }
    fields["decoder"], fields["added_tokens"] = fields["pre_tokenizer"], []


def _split(fields):
    """Divided by a pattern, as in Llama 3 and Qwen."""
    pattern = {"Regex": r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"}
    steps = [
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


HOSTILE = [
    {"type": "Precompiled", "precompiled_charsmap": "////fwAAAABh"},
    {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABh"},
    {"type": "Replace", "pattern": {"Regex": "e?"}, "content": "e" * 999},
    {"type": "Replace", "pattern": {"Regex": "(.+.+)+x"}, "content": ""},
    {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 30},
    {"type": "Split", "pattern": {"Regex": "(e+e+)+y"}, "behavior": "Isolated", "invert": False},
    {"type": "Prepend", "prepend": "e" * 500},
    {"type": "Lowercase"},
]


def of_steps(content, draw):
    """Steps that panic, abort or grow, in front of the others."""
    fields = json.loads(content)
    name = draw.choice(("normalizer", "normalizer", "pre_tokenizer", "decoder"))
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[name]
    steps = [draw.choice(HOSTILE) for _ in range(draw.choice((1, 1, 2, 5, 40)))]
    fields[name] = {"type": "Sequence", inner: [*steps, *([fields[name]] if fields.get(name) else [])]}
    return json.dumps(fields).encode()


def tokenizer_file(change):
    def make(folder):
        fields = json.loads(train_bpe(iter([TEXT * 20]), 290).to_json())
        if change is not None:
            change(fields)
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(fields))

        def read():
            import tokenizers

            loaded = Tokenizer.load(folder)
            loaded.decode(loaded.encode(TEXT)[:8])
            fields = {
                **json.loads(file.read_text()),
                "truncation": None,
                "padding": None,
            }  # documents stay whole
            theirs = tokenizers.Tokenizer.from_str(json.dumps(fields))
            theirs.encode_special_tokens = True
            check_equal(loaded.encode(TEXT), theirs.encode(TEXT, add_special_tokens=False).ids, "tokens")
            return loaded.encode(TEXT)

        return Surface(0.035, file, [of_json, of_json, of_steps, of_bytes], read)

    return make


def transformers_tokenizer(folder):
    for name, content in (
        ("tokenizer.json", train_bpe(iter([TEXT * 20]), 290, ["<|im_end|>"]).to_json()),
        (
            "tokenizer_config.json",
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": "<|im_end|>",
                    "model_max_length": 64,
                    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
                    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
                }
            ),
        ),
    ):
        (folder / name).write_text(content)

    def read():
        loaded = load_tokenizer(TokenizerConfig("transformers", str(folder)))
        return loaded.encode(TEXT), loaded.eos_token, loaded.chat_template

    return Surface(0.03, folder / "tokenizer_config.json", [of_json, of_json, of_bytes], read)


RECORDS = {
    "chat": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]},
        ],
        "tools": [{"name": "f"}],
        "w": 1.5,
    },
    "pairs": {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}], "w": 2},
    "text": {"text": "some text", "w": 0.5},
}
DEEP = ["[" * 700 + "]" * 700, "[" * 99_999, 10**400, -(10**30), "9" * 5000]


def records(form, suffix):
    """Gradients records whose second is a mutant; they are read with data.broken=skip, which never ends in an error."""
    record = RECORDS[form]

    def make(folder):
        file = folder / f"a{suffix}"

        def of_record(content, draw):
            other = of_tree(record, draw)
            if isinstance(other, dict) and draw.random() < 0.2:
                name = draw.choice(["w", "tools", *record])
                other[name] = draw.choice([*DEEP, json.loads("[" * 300 + "]" * 300)])
            texts = [json.dumps(record), json.dumps(other), json.dumps(record)]
            if draw.random() < 0.2:  # and no line end in the mutant
                texts[1] = of_bytes(texts[1].encode(), draw).replace(b"\n", b" ").decode("latin-1")
            return (
                gzip.compress("\n".join(texts).encode())
                if suffix.endswith(".gz")
                else "\n".join(texts).encode()
            )

        file.write_bytes(of_record(b"", random.Random(0)))
        file.write_bytes(
            gzip.compress(b"\n".join([json.dumps(record).encode()] * 3))
            if suffix.endswith(".gz")
            else b"\n".join([json.dumps(record).encode()] * 3)
        )

        def read():
            config = DataConfig(source="jsonl", path=str(file), broken="skip", weight_field="w")
            source = Source(config, TokenizerConfig("byte"))
            found = [(each.name.partition(":")[2], each.parts, each.weight) for each in source]
            kept = [each[1:] for each in found if each[0] in ("1", "3")]
            half = len(kept) // 2
            if not kept or kept[:half] != kept[half:]:
                raise SilentlyDifferent(f"documents of whole records: {kept!r:.200}")
            if source.fault and not source.skipped:
                raise SilentlyDifferent("a broken record is not counted")
            if "\n" in source.fault:
                raise SilentlyDifferent(f"a fault of several lines: {source.fault!r:.200}")
            return found

        return Surface(0.04, file, [of_record], never_refused(read))

    return make


def never_refused(read):
    def call():
        try:
            return read()
        except (ValueError, OSError) as error:
            raise SilentlyDifferent(f"skip does not skip: {error}") from error

    return call


def parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    file = folder / "a.parquet"
    library.write_table(pyarrow.Table.from_pylist([RECORDS["chat"]] * 40), file, row_group_size=10)

    def read():
        source = Source(DataConfig(source="parquet", path=str(file)), TokenizerConfig("byte"))
        return [each.parts for each in source]

    return Surface(0.05, file, [of_bytes], read)


def broken_gzip(folder):
    file = folder / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n".join([json.dumps(RECORDS["chat"]).encode()] * 30)))

    def read():
        source = Source(DataConfig(source="jsonl", path=str(file)), TokenizerConfig("byte"))
        return [each.parts for each in source]

    return Surface(0.02, file, [of_bytes], read)


# --- settings -----------------------------------------------------------------------------------------

AXOLOTL = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [
        {"path": "a.jsonl", "type": "alpaca"},
        {
            "path": "org/name",
            "type": "chat_template",
            "split": "train",
            "field_messages": "m",
            "roles_to_train": ["assistant"],
        },
    ],
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": "2e-4",
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.1,
    "num_epochs": 3,
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": ["q_proj", "v_proj"],
    "unfrozen_parameters": ["model.layers.[0-9]+.mlp"],
    "val_set_size": 0.05,
    "special_tokens": {"pad_token": "<|end|>"},
    "output_dir": "./out",
    "saves_per_epoch": 2,
    "eval_steps": 100,
    "fsdp_config": {"fsdp_offload_params": False},
    "chat_template": "chatml",
    "weight_decay": 0.0,
    "bf16": "auto",
    "unknown_key": 1,
}


def axolotl(folder):
    file = folder / "axolotl.yml"
    file.write_text(json.dumps(AXOLOTL))

    def of_keys(content, draw):
        """Keys and texts with line ends, commands, escapes and patterns without end."""
        tree = json.loads(content)
        for _ in range(draw.choice((1, 2))):
            key = draw.choice(list(tree))
            bad = draw.choice(
                ("a\nout: elsewhere/x\n#b", "(", "((a|b)+)+!", "x; touch Y; $(id)", "\x1b]0;x\x07", 10**400)
            )
            if draw.random() < 0.3 and isinstance(bad, str):
                tree[bad] = draw.choice((1, "a", [bad]))
            else:
                tree[key] = [bad] if isinstance(tree[key], list) else bad
        return json.dumps(tree).encode()

    def read():
        given = read_yaml(file)
        found = import_axolotl(given)
        text = found.to_yaml()
        tree = yaml.safe_load(text) or {}
        flat = {
            f"{group}.{name}": value
            for group, part in tree.items()
            if isinstance(part, dict)
            for name, value in part.items()
        }
        flat |= {name: value for name, value in tree.items() if not isinstance(value, dict)}
        lost = [
            name
            for name, value in flat.items()
            if name in found.settings and str(found.settings[name]) != str(value)
        ]
        lost += [
            name
            for name in flat
            if name not in found.settings and name.partition(".")[0] not in found.settings
        ]
        named = {*found.lacking, *found.left, *found.translated, *found.unneeded}
        lost += [key for key, value in given.items() if key not in named and value not in (None, False, [])]
        if lost:
            raise SilentlyDifferent(f"not named, or otherwise in the YAML: {lost!r:.200}")
        ours = folder / "ours.yaml"
        settings = {name: value for name, value in tree.items() if name != "model"}
        ours.write_text(yaml.safe_dump(settings))
        compose([f"config={ours}"])
        return text

    return Surface(0.08, file, [of_json, of_json, of_keys, of_text], read)


def settings(folder):
    file = folder / "ours.yaml"
    tree = yaml.safe_load(
        "{model: tiny, tokenizer: byte, data: {source: jsonl, path: a.jsonl, fields: [a, b], cache: c},"
        " plan: {capacity: 512, packs_per_step: 4}, train: {steps: 3, dtype: fp32, init_from: ''},"
        " optimizer: {lr: 1.0e-3, eps: 1.0e-8, rules: [a lr=1]}, adapter: {rank: 4, targets: [q_proj]},"
        " out: somewhere}"
    )
    file.write_text(json.dumps(tree))

    def read():
        config = compose([f"config={file}"])
        config.check(1)
        for group, values in read_yaml(file).items():
            for name, value in values.items() if isinstance(values, dict) else ():
                kept = getattr(getattr(config, group), name, "no setting")
                texts = list(map(str, value)) if isinstance(value, list) else str(value)
                same = kept == value or texts in (kept, str(kept)) or (value is None and not kept)
                same = same or (isinstance(value, bool) and kept == str(value).lower())  # as in a word
                if isinstance(kept, list) and isinstance(value, str):  # a list as in a word
                    same = same or ",".join(kept) == value.strip("[]")
                with contextlib.suppress(TypeError, ValueError, OverflowError):
                    same = same or float(kept) == float(value)
                if not same:
                    raise SilentlyDifferent(f"{group}.{name}={value!r:.60} is {kept!r:.60}")
        return repr(config)

    return Surface(0.06, file, [of_json, of_text, of_bytes], read)


def lengths(folder):
    from mutation import of_npy

    from multipack.data.views.stored_lengths import read_lengths

    file = folder / "lengths.npy"
    np.save(file, np.arange(1, 50))

    def read():
        found = np.asarray(read_lengths(file, 4096))
        check_equal(found.tolist(), np.load(file, allow_pickle=False).tolist(), "lengths")
        return found.tolist()

    return Surface(0.03, file, [of_npy, of_bytes], read)


# --- damaged runs -------------------------------------------------------------------------------------


def of_lines(content, draw):
    """Damage to the values of one line of JSON; lines cut, doubled or moved."""
    lines = content.splitlines()
    at = draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        lines[at] = of_bytes(lines[at], draw)
    elif kind == 1:
        lines.insert(draw.randrange(len(lines) + 1), lines[at])
    else:
        lines[at] = of_json(lines[at], draw)
    return b"\n".join(lines) + draw.choice((b"\n", b"\n", b""))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {n} " * (n % 7 + 1)}) + "\n" for n in range(60))
    )
    words = f"data=jsonl data.path={folder}/a.jsonl data.cache={folder}/cache tokenizer=byte model=tiny model.layers=1"
    words += (
        " plan.capacity=256 plan.packs_per_step=2 train.steps=6 train.eval_every=3 train.checkpoint_every=3"
    )
    words += f" train.dtype=fp32 train.sample_tokens=4 train.compare_padding=false log.documents=true out={folder}/run"
    with contextlib.redirect_stdout(None):
        train(compose_run(words.split()))
    return folder / "run"


RUN_FILES = {
    "metrics.jsonl": [of_lines, of_bytes],
    "history.jsonl": [of_lines, of_bytes],
    "documents.jsonl": [of_lines, of_bytes],
    "config.yaml": [of_text, of_bytes],
    "checkpoints/step-00000006/state.json": [of_json, of_bytes],
}
COMMANDS = {
    "report": ["report", "RUN"],
    "page": ["report", "RUN", "-o", "OUT.html"],
    "Markdown": ["report", "RUN", "-o", "OUT.md"],
    "watch": ["watch", "--once", "RUN"],
    "audit": ["audit", "RUN"],
    "doctor": ["doctor", "RUN"],
}


def damaged_run(command, name):
    def make(folder, finished):
        run, printed = folder / "run", folder / "printed"
        shutil.copytree(finished, run, dirs_exist_ok=True)
        words = [
            word.replace("RUN", str(run)).replace("OUT", str(folder / "out")) for word in COMMANDS[command]
        ]

        def read():
            with (
                printed.open("w") as file,
                contextlib.redirect_stdout(file),
                contextlib.redirect_stderr(file),
            ):
                try:
                    app(words, standalone_mode=False)
                except SystemExit as ended:
                    if ended.code not in (0, 1, 2):
                        raise
            texts = [printed, *folder.glob("out.*")]
            if any(b"\x1b" in each.read_bytes() for each in texts):
                raise SilentlyDifferent("an escape sequence is printed")
            return

        return Surface(0.3 / len(COMMANDS) / len(RUN_FILES), run / name, RUN_FILES[name], read)

    return make


SURFACES = {
    **{
        f"config.json of hf:{kind}": foreign_model(kind)
        for kind in ("llama", "gpt2", "mixtral", "gpt_oss", "phi", "deepseek_v3", "opt", "gpt_neox")
    },
    "GGUF": gguf_file,
    "adapter_config.json": adapter("adapter_config.json"),
    "adapter_model.safetensors": adapter("adapter_model.safetensors"),
    "tokenizer.json, bytes": tokenizer_file(None),
    "tokenizer.json, Llama": tokenizer_file(_llama),
    "tokenizer.json, Unigram": tokenizer_file(_unigram),
    "tokenizer.json, Split": tokenizer_file(_split),
    "tokenizer_config.json": transformers_tokenizer,
    **{f"records, {form}": records(form, ".jsonl") for form in RECORDS},
    "records, gz": records("chat", ".jsonl.gz"),
    "gzip": broken_gzip,
    "Parquet": parquet,
    "import-config": axolotl,
    "settings": settings,
    "lengths": lengths,
}


def try_all(drill, name, surface):
    torch.set_num_threads(1)
    one = surface.share * MUTANTS / len(surface.mutations)
    counts = {each: max(round(one * times), 1) for each, times in Counter(surface.mutations).items()}
    drill(name, surface.file, counts.items(), surface.read)
    drill.check()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""))


@pytest.mark.parametrize("name", SURFACES)
def test_files_of_other_tools(name, drill, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try_all(drill, name, SURFACES[name](tmp_path))


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_runs(command, name, drill, tmp_path, finished):
    try_all(drill, f"{command} {name}", damaged_run(command, name)(tmp_path, finished))
