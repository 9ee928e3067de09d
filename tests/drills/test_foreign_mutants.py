"""Mutants of files that other tools wrote, and of damaged runs: refused in one line, or read as the tool reads them.

`MUTANTS=10000 make drills` tries ten times as many, and `SEED=2` draws others. Silently different, and so lost, is a
mutant that is accepted and

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
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
import yaml
from attempts import Surface
from mutation import of_bytes, of_json, of_npy, of_safetensors, of_text, of_tree

from hf_models import MORE, SIZES
from multipack.cli import app
from multipack.data.stores.prepare import items_of
from multipack.data.text.data_config import DataConfig
from multipack.data.text.sources import Source
from multipack.data.text.tokenizer import (
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    load_tokenizer,
    train_bpe,
)
from multipack.data.views.stored_lengths import read_lengths
from multipack.hub import model_folder
from multipack.imports.imported import translate_keys
from multipack.models.decoder import Decoder
from multipack.models.foreign import foreign_shape, open_foreign
from multipack.models.huggingface import parameter_shapes
from multipack.models.probe_batch import packed_batch
from multipack.training.checks import check
from multipack.training.foreign_checks import check_isolated
from multipack.training.inference import load_model
from multipack.training.run_config import compose
from multipack.words import read_yaml

transformers = pytest.importorskip("transformers", "5.2", reason="transformers >= 5.2 is not installed")
pytestmark = pytest.mark.timeout(7200)
TOKENS = [5, 9, 70, 200, 3, 3, 17]
LARGE = 20_000_000
TEXT = "some text, é\n\n  two  spaces <|endoftext|>"


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
        yield Surface(
            f"config.json of hf:{kind}", file, {of_json: 16, of_bytes: 8}, lambda: foreign_logits(folder)
        )

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
    from test_gguf import tiny, write

    pytest.importorskip("gguf")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    file = folder / "tiny.gguf"
    write(file, *tiny(), ["a b"])
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

    yield Surface("GGUF", file, {of_header: 20, of_bytes: 10}, read)


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
        mutations = (
            {of_json: 40, of_bytes: 20} if name.endswith(".json") else {of_safetensors: 30, of_bytes: 30}
        )

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

        yield Surface(name, folder / "adapter" / name, mutations, read)

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
    undone += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    undone += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    fields["decoder"] = {"type": "Sequence", "decoders": undone}


def _unigram(fields):
    pieces = [["<unk>", 0.0], ["▁", -2.0], *([chr(code), -5.0 - code / 100] for code in range(33, 256))]
    fields["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    fields["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    fields["pre_tokenizer"] = spaces
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


def tokenizer_file(name, change=None):
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
            # Documents stay whole.
            fields = {**json.loads(file.read_text()), "truncation": None, "padding": None}
            theirs = tokenizers.Tokenizer.from_str(json.dumps(fields))
            theirs.encode_special_tokens = True
            check_equal(loaded.encode(TEXT), theirs.encode(TEXT, add_special_tokens=False).ids, "tokens")
            return loaded.encode(TEXT)

        yield Surface(f"tokenizer.json, {name}", file, {of_json: 118, of_steps: 9, of_bytes: 59}, read)

    return make


def transformers_tokenizer(folder):
    config = folder / "tokenizer_config.json"
    train_bpe(iter([TEXT * 20]), 290, ["<|im_end|>"]).save(folder / "tokenizer.json")
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "model_max_length": 64}
    fields["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fields["added_tokens_decoder"] = {"0": {"content": "<|endoftext|>", "special": True}}
    config.write_text(json.dumps(fields))

    def read():
        loaded = load_tokenizer(TokenizerConfig("transformers", str(folder)))
        return loaded.encode(TEXT), loaded.eos_token, loaded.chat_template

    yield Surface("tokenizer_config.json", config, {of_json: 20, of_bytes: 10}, read)


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": {"x": [1]}}]},
]
RECORDS = {
    "text": {"text": "some text", "w": 0.5},
    "completion": {"prompt": "a question", "completion": "an answer", "w": 1},
    "chat": {"messages": CHAT, "tools": [{"name": "f"}], "w": 1.5},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "w": 1},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}], "w": 2},
}
DEEP = ["[" * 700 + "]" * 700, "[" * 99_999, 10**400, -(10**30), "9" * 5000]
DEEP.append(json.loads("[" * 300 + "]" * 300))


def read_records(file):
    kind = "parquet" if file.suffix == ".parquet" else "jsonl"
    source = Source(DataConfig(kind, str(file)), TokenizerConfig("byte"))
    assert source.identity
    return [[document.parts for document in item] for item in items_of(source)]


def read_without_broken(file):
    """With data.broken=skip, which never ends in an error; the first and the third record are whole."""
    config = DataConfig(source="jsonl", path=str(file), broken="skip", weight_field="w")
    source = Source(config, TokenizerConfig("byte"))
    try:
        found = [(each.name.partition(":")[2], each.parts, each.weight) for each in source]
    except (ValueError, OSError) as error:
        raise SilentlyDifferent(f"skip does not skip: {error}") from error
    kept = [each[1:] for each in found if each[0] in ("1", "3")]
    half = len(kept) // 2
    if not kept or kept[:half] != kept[half:]:
        raise SilentlyDifferent(f"documents of whole records: {kept!r:.200}")
    if source.fault and not source.noted.skipped:
        raise SilentlyDifferent("a broken record is not counted")
    if "\n" in source.fault:
        raise SilentlyDifferent(f"a fault of several lines: {source.fault!r:.200}")
    return found


def records(form):
    """Lines, a list and packed lines of three records."""
    record = RECORDS[form]
    text = json.dumps(record)

    def of_record(content, draw):
        other = of_tree(record, draw)
        if isinstance(other, dict) and draw.random() < 0.2:
            other[draw.choice(["w", "tools", *record])] = draw.choice(DEEP)
        mutant = json.dumps(other).encode()
        if draw.random() < 0.2:  # and no line end in the mutant
            mutant = of_bytes(mutant, draw).replace(b"\n", b" ").decode("latin-1").encode()
        return b"\n".join([text.encode(), mutant, text.encode()])

    def of_packed(content, draw):
        return gzip.compress(of_record(content, draw))

    def make(folder):
        lines, listed, packed = (folder / name for name in ("a.jsonl", "b.json", "c.jsonl.gz"))
        lines.write_text("\n".join([text] * 3))
        listed.write_text(f"[{text}, {text}, {text}]")
        packed.write_bytes(gzip.compress(lines.read_bytes()))
        yield Surface(f"records, {form}", lines, {of_record: 40}, lambda: read_without_broken(lines))
        yield Surface(f"{form} lines", lines, {of_record: 250, of_bytes: 100}, lambda: read_records(lines))
        yield Surface(f"{form} list", listed, {of_json: 80, of_bytes: 40}, lambda: read_records(listed))
        yield Surface(f"records, gz, {form}", packed, {of_packed: 40}, lambda: read_without_broken(packed))
        yield Surface(f"{form} gz", packed, {of_bytes: 70}, lambda: read_records(packed))

    return make


def parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    file = folder / "a.parquet"
    library.write_table(pyarrow.Table.from_pylist([RECORDS["chat"]] * 40), file, row_group_size=10)

    yield Surface("Parquet", file, {of_bytes: 50}, lambda: read_records(file))


# --- settings -----------------------------------------------------------------------------------------

AXOLOTL = yaml.safe_load("""{
    base_model: NousResearch/Llama-3.2-1B, output_dir: ./out, val_set_size: 0.05, chat_template: chatml,
    datasets: [{path: a.jsonl, type: alpaca}, {path: org/name, type: chat_template, split: train, field_messages: m,
                roles_to_train: [assistant]}],
    sequence_len: 2048, sample_packing: true, micro_batch_size: 2, gradient_accumulation_steps: 4,
    learning_rate: 2e-4, optimizer: adamw_torch_fused, lr_scheduler: cosine, warmup_ratio: 0.1, num_epochs: 3,
    weight_decay: 0.0, bf16: auto, saves_per_epoch: 2, eval_steps: 100, fsdp_config: {fsdp_offload_params: false},
    adapter: lora, lora_r: 8, lora_alpha: 16, lora_target_modules: [q_proj, v_proj],
    unfrozen_parameters: ["model.layers.[0-9]+.mlp"], special_tokens: {pad_token: "<|end|>"}, unknown_key: 1}""")


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
        found = translate_keys(given)
        text = found.to_yaml()
        tree = yaml.safe_load(text) or {}
        groups = {group: part if isinstance(part, dict) else {"": part} for group, part in tree.items()}
        lost = []
        for group, part in groups.items():
            for name, value in part.items():
                setting = f"{group}.{name}".rstrip(".")
                if setting in found.settings:
                    lost += [setting] * (str(found.settings[setting]) != str(value))
                else:
                    lost += [setting] * (group not in found.settings)
        named = {*found.lacking, *found.left, *found.translated, *found.unneeded}
        lost += [key for key, value in given.items() if key not in named and value not in (None, False, [])]
        if lost:
            raise SilentlyDifferent(f"not named, or otherwise in the YAML: {lost!r:.200}")
        ours = folder / "ours.yaml"
        settings = {name: value for name, value in tree.items() if name != "model"}
        ours.write_text(yaml.safe_dump(settings))
        compose([f"config={ours}"])
        return text

    yield Surface("import-config", file, {of_json: 40, of_keys: 20, of_text: 20}, read)


def settings(folder):
    file = folder / "ours.yaml"
    words = "tokenizer=byte data=jsonl data.path=a.jsonl data.fields=[a,b] plan.capacity=512 train.steps=3"
    words += " data.cache=c train.dtype=fp32 optimizer.lr=1e-3 adapter=lora adapter.base=base adapter.targets=[q_proj]"
    tree = {**asdict(compose([*words.split(), "optimizer.rules=[a lr=1]"])), "out": "somewhere"}
    file.write_text(json.dumps(tree))

    def read():
        config = compose([f"config={file}"])
        check(config, 1)
        if config.model.layers < 100 and config.model.d_model < 1 << 13:
            parameter_shapes(config.shape_with(300))
        for group, values in read_yaml(file).items():
            for name, value in values.items() if isinstance(values, dict) else ():
                kept = getattr(getattr(config, group), name, "no setting")
                kept = list(kept) if isinstance(kept, tuple) else kept
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

    yield Surface("settings", file, {of_json: 200, of_text: 100, of_bytes: 100}, read)


def lengths(folder):
    file = folder / "lengths.npy"
    np.save(file, np.arange(1, 50))

    def read():
        found = np.asarray(read_lengths(file, 4096))
        check_equal(found.tolist(), np.load(file, allow_pickle=False).tolist(), "lengths")
        return found.tolist()

    yield Surface("lengths", file, {of_npy: 400, of_bytes: 500}, read)


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


FILES = {
    "metrics.jsonl": of_lines,
    "history.jsonl": of_lines,
    "documents.jsonl": of_lines,
    "config.yaml": of_text,
    "checkpoints/step-00000006/state.json": of_json,
}
"""File of a run → mutations of it, beside `of_bytes`."""
COMMANDS = {
    "report": "report RUN",
    "page": "report RUN -o OUT.html",
    "watch": "watch --once RUN",
    "audit": "audit RUN",
    "doctor": "doctor RUN",
}


def damaged_runs(folder, finished, command):
    run, printed = folder / "run", folder / "printed"
    shutil.copytree(finished, run)
    words = COMMANDS[command].replace("RUN", str(run)).replace("OUT", str(folder / "out")).split()

    def read():
        with printed.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                app(words, standalone_mode=False)
            except SystemExit as ended:
                if ended.code not in (0, 1, 2):
                    raise
        if any(b"\x1b" in each.read_bytes() for each in [printed, *folder.glob("out.*")]):
            raise SilentlyDifferent("an escape sequence is printed")

    for name, mutate in FILES.items():
        yield Surface(f"{command} {name}", run / name, {mutate: 5, of_bytes: 5}, read)


SURFACES = {
    **{
        f"config.json of hf:{kind}": foreign_model(kind)
        for kind in ("llama", "gpt2", "mixtral", "gpt_oss", "phi", "deepseek_v3", "opt", "gpt_neox")
    },
    "GGUF": gguf_file,
    "adapter_config.json": adapter("adapter_config.json"),
    "adapter_model.safetensors": adapter("adapter_model.safetensors"),
    "tokenizer.json, bytes": tokenizer_file("bytes"),
    "tokenizer.json, Llama": tokenizer_file("Llama", _llama),
    "tokenizer.json, Unigram": tokenizer_file("Unigram", _unigram),
    "tokenizer.json, Split": tokenizer_file("Split", _split),
    "tokenizer_config.json": transformers_tokenizer,
    **{f"records, {form}": records(form) for form in RECORDS},
    "Parquet": parquet,
    "import-config": axolotl,
    "settings": settings,
    "lengths": lengths,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Nothing is asked of the network, and one thread computes."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SURFACES)
def test_files_of_other_tools(name, drill, tmp_path):
    drill(SURFACES[name](tmp_path))


@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_runs(command, drill, tmp_path, finished):
    drill(damaged_runs(tmp_path, finished, command))
