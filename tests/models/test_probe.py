"""The isolation probe: correct models are clean, and every planted bug is found, with its place and what to do."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from multipack import Decoder, ModelShape, isolation_probe
from multipack.models.probe_batch import packed_batch, transformers_batch

transformers = pytest.importorskip("transformers", "4.53", "transformers makes masks of documents since 4.53")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def built(family, attention="sdpa", **changes):
    """A tiny model of transformers with random weights."""
    sizes = GPT2 if family == "GPT2" else SIZES
    config = getattr(transformers, f"{family}Config")(**sizes | changes, attn_implementation=attention)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


# --- models without a leak ----------------------------------------------------------------------------


def test_decoder_is_clean():
    for positions in ("rope", "learned"):
        shape = ModelShape(layers=2, heads=2, d_model=32, d_ff=48, vocabulary_size=100, positions=positions)
        report = isolation_probe(Decoder(shape))
        assert report.ok
        assert max(report.differences) < 1e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "GPT2", "Mixtral"])
def test_models_of_transformers_are_clean(family, attention):
    if family == "GPT2" and not hasattr(transformers.models.gpt2.modeling_gpt2, "create_causal_mask"):
        pytest.skip("this version's GPT-2 makes its mask without positions")
    report = isolation_probe(
        built(family, attention, **({"sliding_window": 4} if family == "Mistral" else {}))
    )
    assert report.check() is report
    assert str(report).startswith("isolated: 3 documents")


def test_a_model_without_a_head_is_probed_by_its_hidden_states():
    model = transformers.AutoModel.from_config(transformers.LlamaConfig(**SIZES))
    assert isolation_probe(model).ok
    assert isolation_probe(model, lambda documents: transformers_batch(documents) | {"use_cache": True}).leaks


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_documents_that_rotate_their_row_are_named(scaling):
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    rotary = {"rope_type": scaling, "factor": 4.0, "rope_theta": 1e4} | (
        factors if scaling == "longrope" else {}
    )
    length = 16 if scaling == "dynamic" else 64
    model = built("Llama", rope_parameters=rotary, max_position_embeddings=length)
    for layer in model.model.layers:  # scores that rotations change
        layer.self_attn.q_proj.weight.data.mul_(30)
        layer.self_attn.k_proj.weight.data.mul_(30)
    report = isolation_probe(model)
    assert report.ok
    assert report.limit.tokens == 16
    assert f"rope_type={scaling}" in str(report)
    longer = isolation_probe(model, lengths=(9, 17, 11))
    assert longer.causes == ("rotation",)
    assert longer.differences[0] > 1e-3


def test_sixteen_bits_are_clean_and_leak():
    for family in ("Llama", "Mixtral"):
        model = built(family).bfloat16()
        assert isolation_probe(model).ok
        assert isolation_probe(model, with_changes(use_cache=True)).causes == ("leak",)


def test_small_leaks_in_sixteen_bits_are_found():
    model = built("Llama").bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
    leaks = isolation_probe(model, with_changes(use_cache=True)).leaks
    assert 0 < max(leaks.values()) < 0.02


def test_the_model_is_left_as_it_was():
    model = built("Llama", attention_dropout=0.5).train()
    model.model.norm.eval()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert isolation_probe(model).ok
    assert torch.equal(torch.rand(2), expected)
    assert [module.training for module in model.modules()].count(False) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_adapters_are_probed():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(built("Llama"), peft.LoraConfig(task_type="CAUSAL_LM"))
    assert isolation_probe(model).ok
    assert isolation_probe(model, with_changes(attention_mask="ones")).causes == ("leak",)


# --- batches with a planted bug -----------------------------------------------------------------------


def labelled(documents):
    batch = transformers_batch(documents)
    labels = batch["input_ids"].clone()
    labels[0, batch["cu_seq_lens_q"][:-1].long()] = -100
    return batch | {"labels": labels}


def with_changes(**changes):
    """A collator that is right but for these fields; None removes one."""

    def make(documents):
        batch = labelled(documents)
        tokens = batch["input_ids"].shape[1]
        for name, value in changes.items():
            batch[name] = value(batch) if callable(value) else value
            if isinstance(value, str):
                batch[name] = torch.ones(1, tokens, dtype=torch.long)
        return {name: value for name, value in batch.items() if value is not None}

    return make


def bounds(change):
    return {"cu_seq_lens_q": lambda batch: change(batch["cu_seq_lens_k"].clone())}


def off_by_one(bound):
    bound[1:-1] += 1
    return bound


def border_labels(batch):
    return batch["input_ids"].clone()


def shifted_labels(batch):
    return torch.where(batch["labels"].roll(-1, 1) == -100, -100, batch["input_ids"].roll(-1, 1))


def causal_mask(batch):
    tokens = batch["input_ids"].shape[1]
    return torch.full((tokens, tokens), torch.finfo(torch.float32).min).triu(1)[None, None]


def continued(batch):
    """The second document's positions continue those of the first one."""
    positions = batch["position_ids"].clone()
    start, end = batch["cu_seq_lens_q"][1:3].tolist()
    positions[0, start:end] += start
    return positions


BATCHES = {
    "cu_seqlens off by one": (bounds(off_by_one), "bounds"),
    "cu_seqlens of int64": (bounds(torch.Tensor.long), "bounds"),
    "cu_seqlens without the last bound": (bounds(lambda bound: bound[:-1]), "bounds"),
    "two documents as one in cu_seqlens": (bounds(lambda bound: bound[[0, 1, 3]]), "bounds"),
    "max_length too small": ({"max_length_q": 7, "max_length_k": 7}, "bounds"),
    "positions not reset": ({"position_ids": lambda batch: torch.arange(27)[None]}, "positions leak"),
    "positions from 1": ({"position_ids": lambda batch: batch["position_ids"] + 1}, "positions"),
    "positions of one document go on": ({"position_ids": continued}, "positions leak"),
    "seq_idx of one document": ({"seq_idx": lambda batch: torch.zeros_like(batch["seq_idx"])}, "segments"),
    "target at a border": ({"labels": border_labels}, "border"),
    "labels shifted twice": ({"labels": shifted_labels}, "labels"),
    "labels of other tokens": ({"labels": lambda batch: batch["labels"].roll(3, 1)}, "labels"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_wrong_field_of_a_batch_is_named(name):
    changes, causes = BATCHES[name]
    report = isolation_probe(built("Llama"), with_changes(**changes))
    assert report.causes == tuple(causes.split())
    with pytest.raises(ValueError, match=f"not isolated: .*{report.causes[0]}: ") as error:
        report.check()
    assert "\n" not in str(error.value)


CONVENTIONS = {
    "no positions": {"position_ids": None},
    "cache by default": {"use_cache": None},
    "mask of ones": {"attention_mask": "ones"},
    "causal 4D mask": {"attention_mask": causal_mask},
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_batch_from_which_transformers_makes_no_masks_of_documents_leaks(name):
    report = isolation_probe(built("Llama"), with_changes(**CONVENTIONS[name]))
    assert report.causes == ("leak",)
    assert "model.layers.0.self_attn (LlamaAttention)" in report.findings[0].text
    assert "use_cache=False" in report.findings[0].remedy
    with pytest.raises(
        ValueError, match=r"not isolated: document \d changes document \d by .*leak: "
    ) as error:
        report.check()
    assert "\n" not in str(error.value)


def test_a_mask_that_drops_the_window_is_a_difference():
    def block_mask(batch):
        owner, mask = batch["seq_idx"][0], causal_mask(batch)
        return mask.masked_fill(owner[:, None] != owner, torch.finfo(torch.float32).min)

    report = isolation_probe(built("Mistral", sliding_window=4), with_changes(attention_mask=block_mask))
    assert not report.leaks
    assert report.causes == ("difference",)
    assert "self_attn (MistralAttention), in " in report.findings[0].text


def test_a_batch_that_lost_tokens_is_refused():
    with pytest.raises(ValueError, match="is not whole in one row of input_ids"):
        isolation_probe(
            built("Llama"), lambda documents: transformers_batch([each[:9] for each in documents])
        )


# --- models with a planted bug ------------------------------------------------------------------------


class Tiny(nn.Module):
    """Embedding, one mixing layer of a planted kind, and a head, over a `PackedBatch`."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(100, 16)
        self.positions = nn.Embedding(64, 16)
        self.layer = layer
        self.head = nn.Linear(16, 100)

    def forward(self, batch):
        x = self.embedding(batch.input_ids) + self.positions(self.layer.positions(batch))
        return self.head(x + self.layer(x, batch))


class Layer(nn.Module):
    def positions(self, batch):
        return batch.position_ids


class Attention(Layer):
    """Attention under a mask from (document of each token, batch)."""

    def __init__(self, visible, positions=None):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.visible = visible
        if positions:
            self.positions = positions

    def forward(self, x, batch):
        q, k, v = self.qkv(x).chunk(3, -1)
        owner = torch.repeat_interleave(torch.tensor(batch.lengths))
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=self.visible(owner, batch)
        )[0]


class Recurrence(Layer):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(16, 16)

    def forward(self, x, batch):
        return self.cell(x)[0]


class Shift(Layer):
    def forward(self, x, batch):
        return F.pad(x, (0, 0, 1, 0))[:-1] * 0.5


class CapacityExperts(Layer):
    """Two experts that each take at most 8 tokens of the pack."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x, batch):
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:8, 0]
            out[rows] = expert(x[rows])
        return out


class Stateful(Layer):
    """Keeps the last hidden states for the next call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("held", torch.zeros(1, 16))

    def forward(self, x, batch):
        before, self.held = self.held, x.mean(0, keepdim=True)
        return x + before


def causal(owner):
    return torch.ones(len(owner), len(owner), dtype=torch.bool).tril()


def inside(owner, batch):
    return causal(owner) & (owner[:, None] == owner)


def inside_shifted(owner, batch):
    """The bounds of the mask are one token too far."""
    moved = owner.roll(1)
    moved[0] = 0
    return causal(owner) & (moved[:, None] == moved)


def inside_merged(owner, batch):
    owner = owner.clamp(max=1)
    return causal(owner) & (owner[:, None] == owner)


def windowed_alone(owner, batch):
    """A window of 4 tokens that packs do not have."""
    mask = inside(owner, batch)
    return mask.triu(-3) if batch.num_documents == 1 else mask


def count_all(batch):
    return torch.arange(len(batch.input_ids))


def count_twice(batch):
    return torch.clamp(batch.position_ids * (1 + (batch.num_documents > 1)), max=63)


torch.manual_seed(0)  # of the weights of these layers
MODELS = {
    "attention over the whole pack": (Attention(lambda owner, batch: causal(owner)), "leak"),
    "mask one token too far": (Attention(inside_shifted), "leak"),
    "last two documents merged": (Attention(inside_merged), "leak"),
    "bidirectional attention over the pack": (
        Attention(lambda owner, batch: torch.ones_like(causal(owner))),
        "leak",
    ),
    "bidirectional attention in documents": (
        Attention(lambda owner, batch: owner[:, None] == owner),
        "future",
    ),
    "window lost in packs": (Attention(windowed_alone), "difference"),
    "recurrent state": (Recurrence(), "leak"),
    "token shift": (Shift(), "leak"),
    "experts with a capacity": (CapacityExperts(), "leak"),
    "state between calls": (Stateful(), "state"),
}


@pytest.mark.parametrize("name", MODELS)
def test_planted_bug_of_a_model_is_found_with_its_module(name):
    layer, cause = MODELS[name]
    torch.manual_seed(0)
    report = isolation_probe(Tiny(layer))
    assert cause in report.causes
    assert set(report.causes) <= {cause, "future"}
    named = [finding.text for finding in report.findings if finding.cause == cause]
    if cause in ("leak", "difference"):
        assert ": layer" in named[0]


@pytest.mark.parametrize("count", [count_all, count_twice])
def test_positions_that_no_module_counts_are_a_difference(count):
    report = isolation_probe(Tiny(Attention(inside, count)))
    assert report.causes == ("difference",)
    assert not report.leaks
    assert "positions" in report.findings[0].remedy


def test_a_correct_plain_model_is_clean():
    report = isolation_probe(Tiny(Attention(inside)))
    assert report.ok
    assert report.leaks == {}
    assert isolation_probe(Tiny(Attention(inside)).__call__, vocabulary_size=100).ok


def test_outputs_that_are_not_finite_are_no_leak():
    report = isolation_probe(
        Tiny(Shift()), forward=lambda batch: torch.full((len(batch.input_ids), 5), torch.nan)
    )
    assert report.causes == ("not_finite",)
    assert report.findings[0].remedy == "check the weights and the dtype"


def test_the_leaking_documents_are_named():
    assert set(isolation_probe(Tiny(MODELS["last two documents merged"][0])).leaks) == {(1, 2)}
    shifted = isolation_probe(Tiny(Attention(inside_shifted))).leaks
    assert set(shifted) == {(0, 1), (1, 2)}


def test_targets_of_a_packed_batch_are_checked():
    def make(documents):
        batch = packed_batch(documents)
        return replace(batch, targets=batch.input_ids.roll(-1))

    assert isolation_probe(Tiny(Attention(inside)), make).causes == ("border",)


MODELS_OF_TRANSFORMERS = {
    "mask without positions": ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 32}, "self_attn"),
    "recurrent layers": ("Mamba", {"state_size": 4}, "mixer"),
}


@pytest.mark.parametrize("name", MODELS_OF_TRANSFORMERS)
def test_models_of_transformers_that_ignore_bounds_are_named(name):
    family, changes, module = MODELS_OF_TRANSFORMERS[name]
    report = isolation_probe(built(family, "eager", **changes))
    assert report.causes == ("leak",)
    assert module in report.findings[0].text
    assert (0, 1) in report.leaks


def test_two_rows_under_an_attention_that_reads_one():
    """As flash attention in transformers: positions of a batch of one row only."""

    def attend(module, query, key, value, mask, **kwargs):
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        if len(query) == 1:
            owner = (kwargs["position_ids"][0] == 0).cumsum(0)
            visible = visible & (owner[:, None] == owner)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible).transpose(1, 2), None

    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("one_row", attend)
    AttentionMaskInterface.register("one_row", lambda *args, **kwargs: None)

    def two_rows(documents):
        rows = [transformers_batch(documents)] * 2
        return {"use_cache": False} | {
            name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")
        }

    model = built("Llama")
    model.config._attn_implementation = "one_row"
    assert isolation_probe(model).ok
    assert isolation_probe(model, two_rows).causes == ("leak",)


def test_what_cannot_be_probed_is_said_in_one_line():
    class Refusing(Tiny):
        def forward(self, batch):
            raise NotImplementedError("bounds are not supported")

    report = isolation_probe(Refusing(Shift()))
    assert report.causes == ("refused",)
    assert "bounds are not supported" in report.findings[0].text
    with pytest.raises(ValueError, match="pass forward=lambda batch"):
        isolation_probe(Tiny(Shift()), forward=lambda batch: torch.zeros(()))
    with pytest.raises(ValueError, match="no embedding: pass vocabulary_size"):
        isolation_probe(nn.Linear(2, 2))
