import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from multipack.data.packs.batch import PackedBatch
from multipack.ops.attention.foreign_attention import OLDEST, attend, register
from multipack.ops.attention.masks import mask_4d
from multipack.ops.attention.row_mask import RowMask, make_mask

transformers = pytest.importorskip("transformers", OLDEST, f"the attention needs transformers {OLDEST}")
EARLIER = "5.0.0"
LENGTHS = 7, 12, 1, 9, 16
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TWO = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3, **TWO},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 3, **TWO},
    "phi3": {"sliding_window": 6},
    "cohere2": TWO,
    "gpt2": GPT2,
    "gpt_neox": {},
    "granite": {"attention_multiplier": 0.3},
    "mixtral": {"sliding_window": 5, **MOE},
    "gpt_oss": {"head_dim": 8, **MOE, **TWO},
    "deepseek_v3": MLA,
    "llama4_text": {"attention_chunk_size": 5, "head_dim": 8, "intermediate_size_mlp": 48, **MOE, **CHUNKS},
}
"""model_type → fields of its configuration."""

MODELS = {name: fields for name, fields in MODELS.items() if name in transformers.CONFIG_MAPPING}
ALONG_ROWS = not hasattr(transformers.masking_utils, "packed_sequence_compatibility_function")
"""Whether this transformers counts chunks along a packed row."""


@pytest.fixture(autouse=True)
def registered():
    register()
    register()


def build(name, attention="multipack", **fields):
    """A model in float64 with attention that is far from uniform."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SHAPE, **MODELS[name], **fields})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data = parameter.data * 4 if parameter.dim() > 1 else parameter.data + 0.3
    return model.double().eval()


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 64, (length,), generator=generator) for length in lengths]


def packed(docs):
    """The packed row of documents, as collators give it to models."""
    lengths = [len(document) for document in docs]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return {
        "input_ids": torch.cat(docs)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
    }


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def alone(model, docs):
    """Logits of each document alone and, of their sum over `weights`, the gradients."""
    logits = torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in docs])
    (logits * weights(logits)).sum().backward()
    return logits.detach(), gradients(model)


def weights(logits):
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)


def distance(x, reference):
    x, reference = x.detach(), reference.detach()
    return float((x - reference).abs().max() / reference.abs().max().clamp(min=1e-12))


def check(model, inputs, logits, reference):
    found = model(**inputs).logits.flatten(0, 1)
    assert distance(found, logits) < 1e-6
    (found * weights(found)).sum().backward()
    found = gradients(model)
    assert found.keys() == reference.keys()
    assert max(distance(found[name], reference[name]) for name in found) < 1e-5


FAST = ("llama", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "llama4_text")
"""Each kind of attention once."""
CACHED = ("mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "llama4_text")
"""Each kind once of what is not packed: windows, soft caps, sinks, other widths, chunks."""


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_packed_equals_alone(name):
    """Logits and gradients, with bounds from each of their sources, with a cache and with a mask of ones."""
    docs = documents()
    if name == "llama4_text" and ALONG_ROWS:
        for inputs in (packed(docs), {**packed(docs), "cu_seq_lens_q": None, "cu_seq_lens_k": None}):
            assert "chunks of 5 tokens that are counted along a packed row" in refusal(name, inputs)
        return
    model = build(name, "eager")
    reference = alone(model, docs)
    model.set_attn_implementation("multipack")
    assert model.config._attn_implementation == "multipack"
    row = packed(docs)
    bounds = {key: row[key] for key in row if key.startswith(("cu_", "max_"))}
    tokens = {key: row[key] for key in ("input_ids", "position_ids")}
    check(model, row, *reference)
    check(model, {**tokens, "use_cache": False}, *reference)
    if (
        name != "llama4_text"
    ):  # chunks are counted inside documents only where transformers sees the documents
        check(model, {**tokens, **bounds}, *reference)
        check(model, tokens, *reference)
        ones = torch.ones_like(row["input_ids"])
        check(model, {**row, "attention_mask": ones}, *reference)
        check(model, {**tokens, "attention_mask": ones, "use_cache": False}, *reference)


@pytest.mark.parametrize("name", CACHED)
def test_rows_without_padding_equal_eager(name):
    """Plain batches, one document a row, keep their result."""
    rows = torch.stack(documents([16] * 3))
    model = build(name, "eager")
    logits = model(input_ids=rows, use_cache=False).logits
    model.set_attn_implementation("multipack")
    for inputs in ({"use_cache": False}, {}, {"attention_mask": torch.ones_like(rows)}):
        assert distance(model(input_ids=rows, **inputs).logits, logits) < 1e-6


def test_several_packed_rows():
    docs = documents([7, 9, 11, 5])
    model = build("mistral", "eager")
    reference = alone(model, docs)
    model.set_attn_implementation("multipack")
    row = packed(docs)
    two = {key: row[key].view(2, 16) for key in ("input_ids", "position_ids")}
    check(model, {**two, "use_cache": False}, *reference)
    bounds = {key: row[key] for key in row if key.startswith(("cu_", "max_"))}
    check(model, {**two, **bounds, "use_cache": False}, *reference)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_equals_eager(name, padded):
    prompts = documents([9, 9] if not padded else [9, 6])
    ids = torch.stack([torch.nn.functional.pad(prompt, (9 - len(prompt), 0)) for prompt in prompts])
    mask = (ids != 0).long()
    model = build(name, "eager").float()  # in float64, eager attention makes rows of padding NaN
    inputs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    greedy = model.generate(ids, **inputs)
    cacheless = model.generate(ids, **inputs, use_cache=False)
    model.set_attn_implementation("multipack")
    assert torch.equal(model.generate(ids, **inputs), greedy)
    assert torch.equal(model.generate(ids, **inputs, use_cache=False), cacheless)


def test_generation_is_that_of_sdpa_bit_for_bit():
    model = build("llama", "sdpa")
    ids = torch.stack(documents([9, 9]))
    inputs = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    reference = model.generate(ids, attention_mask=mask, **inputs)
    model.set_attn_implementation("multipack")
    found = model.generate(ids, attention_mask=mask, **inputs)
    assert all(map(torch.equal, found.logits, reference.logits))


def test_static_cache():
    model = build("mistral", "sdpa")
    ids = torch.stack(documents([9, 9]))
    inputs = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    reference = model.generate(ids, attention_mask=torch.ones_like(ids), **inputs)
    model.set_attn_implementation("multipack")
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **inputs), reference)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradient_checkpointing(name, reentrant):
    docs = documents()
    model = build(name, "eager")
    reference = alone(model, docs)
    model.set_attn_implementation("multipack")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    check(model, packed(docs), *reference)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for found in torch.utils._pytree.tree_leaves(result):
            if isinstance(found, torch.Tensor):
                self.elements = max(self.elements, found.numel())
        return result


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_no_tensor_of_all_pairs(name):
    docs = documents([30, 35, *[32] * 6])
    row = packed(docs)
    positions_only = {key: row[key] for key in ("input_ids", "position_ids", "use_cache")}
    sizes = []
    for attention, inputs in (("eager", row), ("multipack", row), ("multipack", positions_only)):
        model = build(name, attention)
        with Largest() as largest:
            model(**inputs).logits.sum().backward()
        sizes.append(largest.elements)
    assert sizes[0] >= 257**2
    assert max(sizes[1:]) < 257**2 / 2


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "llama"])
def test_dropout_stays_inside_documents(name):
    model = build(name, **({"attn_pdrop": 0.5} if name == "gpt2" else {"attention_dropout": 0.5})).train()
    first, second = documents([20, 20])
    torch.manual_seed(0)
    one = model(**packed([first, second])).logits
    torch.manual_seed(0)
    other = model(**packed([first, second.flip(0)])).logits
    assert torch.equal(one[:, :20], other[:, :20])
    assert not torch.equal(one, model(**packed([first, second])).logits)


def test_autocast():
    model = build("gemma2").float()
    row = packed(documents())
    reference = model(**row).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(**row).logits
    assert distance(found.float(), reference) < 0.3


def test_inference_mode():
    model, row = build("mistral"), packed(documents())
    with torch.inference_mode():
        found = model(**packed(documents())).logits
    assert distance(found, model(**row).logits) < 1e-12


def refusal(name, inputs, **fields):
    model = build(name, **fields)
    with pytest.raises(ValueError) as caught:
        model(**inputs)
    message = str(caught.value)
    assert message.startswith("attn_implementation=multipack does not support ")
    assert "\n" not in message
    return message


def test_refusals():
    docs = documents()
    row, slots = packed(docs), sum(LENGTHS)
    short = torch.tensor([0, 7, slots - 1], dtype=torch.int32)
    assert "cu_seq_lens_q=0 … 44: it rises from 0 to 45" in refusal("llama", {**row, "cu_seq_lens_q": short})
    falling = torch.tensor([0, 19, 7, slots], dtype=torch.int32)
    assert "cu_seq_lens_q" in refusal("llama", {**row, "cu_seq_lens_q": falling})
    other = torch.tensor([0, 9, slots], dtype=torch.int32)
    assert "cu_seq_lens_k that differs" in refusal("llama", {**row, "cu_seq_lens_k": other})
    padding = torch.ones_like(row["input_ids"]).index_fill(1, torch.tensor([0]), 0)
    assert "attention_mask together with cu_seq_lens_q" in refusal(
        "llama", {**row, "attention_mask": padding}
    )
    positions = {key: row[key] for key in ("input_ids", "position_ids", "use_cache")}
    assert "documents see each other" in refusal("llama", {**positions, "attention_mask": padding})
    assert "output_attentions=True" in refusal_of_layer(output_attentions=True)
    assert "is_causal=False" in refusal_of_layer(is_causal=False, cu_seq_lens_q=torch.tensor([0, 4]))
    assert "position_bias" in refusal_of_layer(
        position_bias=torch.zeros(1), cu_seq_lens_q=torch.tensor([0, 4])
    )
    for argument in ("indices", "block_indices", "sinks", "cache"):
        assert f"support {argument}:" in refusal_of_layer(**{argument: torch.zeros(1)})
    mask = RowMask(1, 4, (0, 2), None, torch.device("cpu"))
    assert "sliding_window=1 of a layer whose mask" in refusal_of_layer(mask, sliding_window=1)


def refusal_of_layer(mask=None, **arguments):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError) as caught:
        attend(torch.nn.Identity(), q, q, q, mask, **arguments)
    return str(caught.value)


def test_a_cache_with_earlier_tokens_is_refused():
    model, row = build("llama"), packed(documents())
    model(**{**row, "use_cache": True})
    bounds = {key: row[key] for key in ("cu_seq_lens_q", "cu_seq_lens_k")}
    with pytest.raises(ValueError, match="cu_seq_lens_q with a cache: 1 queries for 46 keys"):
        model.generate(row["input_ids"], position_ids=row["position_ids"], max_new_tokens=4, **bounds)


def batch_of(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    ids = torch.zeros(sum(lengths), dtype=torch.long)
    return PackedBatch(
        ids, ids, ids, bounds, max(lengths), len(lengths), len(ids), 0, tuple(lengths), max(lengths), 0
    )


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_dense_masks_of_the_user(dtype):
    """A mask of documents is honored, and refused where it lacks the window of the model."""
    docs = documents()
    row = packed(docs)
    inputs = {key: row[key] for key in ("input_ids", "position_ids", "use_cache")}
    model = build("llama", "eager")
    logits, _ = alone(model, docs)
    model.set_attn_implementation("multipack")
    inputs["attention_mask"] = mask_4d(batch_of(LENGTHS), dtype)
    assert distance(model(**inputs).logits[0], logits) < 1e-6
    assert "wider than sliding_window=5" in refusal("mistral", inputs)
    inputs["attention_mask"] = mask_4d(batch_of(LENGTHS), dtype, window=5)
    logits, _ = alone(build("mistral", "eager"), docs)
    assert distance(build("mistral")(**inputs).logits[0], logits) < 1e-6


def test_chunks_that_are_counted_along_a_packed_row_are_refused():
    """Earlier transformers makes such masks; a stand-in for them, and those of documents that agree with them."""
    config = transformers.Llama4TextConfig(attention_chunk_size=5)

    def found(starts):
        def same(row, head, query, key):
            return (query >= key) & (sum(query >= s for s in starts) == sum(key >= s for s in starts))

        return make_mask(
            1, 12, 12, mask_function=same, local_size=5, allow_is_causal_skip=False, config=config
        ).starts

    assert found((0, 5, 7, 12)) == (0, 5, 7)
    assert found((0, 5, 10)) == (0, 5, 10)
    with pytest.raises(ValueError, match="chunks of 5 tokens that are counted along a packed row: update"):
        found((0, 5, 7, 10))


def test_chunks_that_do_not_start_with_documents_are_refused():
    row = packed(documents())
    message = refusal("llama4_text", {**row, "use_cache": True})
    assert "chunks of 5 tokens that do not start with the documents" in message


def test_bidirectional_models_keep_their_mask():
    docs = torch.stack(documents([9, 9]))
    model = build("gemma3_text", "eager", use_bidirectional_attention=True)
    reference = model(input_ids=docs, use_cache=False).logits
    model.set_attn_implementation("multipack")
    assert distance(model(input_ids=docs, use_cache=False).logits, reference) < 1e-6


def test_models_that_compute_with_the_mask_are_refused():
    mask = RowMask(1, 4, (0, 2), None, torch.device("cpu"))
    assert mask.shape == (1, 1, 4, 4)
    assert mask.to("cpu").contiguous() is mask
    for use in (lambda: mask[:, :, :2], lambda: torch.zeros(4, 4) + mask, lambda: torch.where(mask, 0, 1)):
        with pytest.raises(ValueError, match="does not support models that compute with their mask"):
            use()


def test_masks_of_earlier_transformers():
    """They pass cache_position in place of lengths and offsets."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    found = make_mask(
        1,
        kv_length=6,
        mask_function=sliding_window_causal_mask_function(2),
        local_size=2,
        cache_position=torch.arange(6),
    )
    assert (found.starts, found.window) == ((0,), 2)


def test_from_pretrained(tmp_path):
    build("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="multipack", dtype=torch.float64
    )
    row = packed(documents())
    ours = build("llama")
    expected, found = ours(**row).logits, model(**row).logits
    # Rotations and norms of transformers are in float32: a part of what a model in float32 rounds.
    rounded = ours.float()(**row).logits.double()
    torch.testing.assert_close(found, expected, rtol=0, atol=float((rounded - expected).abs().max()))


def test_models_with_attention_of_their_own_are_refused():
    model = build("llama", "eager")
    register(model)
    assert model.config._attn_implementation == "multipack"
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="BloomForCausalLM, whose attention is its own: keep attn_impl"):
        register(transformers.BloomForCausalLM(bloom))


def test_earlier_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", EARLIER)
    with pytest.raises(
        ImportError, match=f"=multipack needs transformers >= {OLDEST}, .* got {EARLIER}: pip install"
    ):
        register()


def test_trainers_register_it_on_cpus(tmp_path, caplog, monkeypatch):
    """Where the probe passes with it; `packed_attention` decides otherwise, and checkpoints do not name it."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from multipack.integrations import transformers as host
    from multipack.integrations.collator import PackedDataCollator

    def made(attention="sdpa", collator=None, **named):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True
        )
        rows = [{"input_ids": document.tolist()} for document in documents()]
        model = build("llama", attention).float()
        return host.PackedTrainer(model, arguments, collator, train_dataset=rows, capacity=16, **named)

    def attention_of(*args, **named):
        return made(*args, **named).model.config._attn_implementation

    trainer = made()
    assert trainer.model.config._attn_implementation == "multipack"
    assert "without sdpa's mask of all pairs of tokens (packed_attention=False keeps it)" in caplog.text
    kept = made(packed_attention=False)
    assert kept.model.config._attn_implementation == "sdpa"
    assert trainer.train().training_loss == pytest.approx(kept.train().training_loss, rel=1e-6)
    trainer.save_model(tmp_path / "model")
    assert "multipack" not in (tmp_path / "model" / "config.json").read_text()
    assert attention_of("eager") == "multipack"
    assert attention_of(collator=PackedDataCollator("4d_mask", window=None)) == "sdpa"
    assert attention_of(probe=False) == "sdpa"
    assert attention_of(probe=False, packed_attention=True) == "multipack"
    monkeypatch.setattr("transformers.__version__", EARLIER)
    assert attention_of() == "sdpa"
    with pytest.raises(ImportError, match=f"transformers >= {OLDEST}"):
        made(packed_attention=True)
