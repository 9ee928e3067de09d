"""Adapters: the same losses and gradients as peft's on the same weights, and what they begin with."""

import dataclasses

import pytest
import torch

from multipack.models.decoder import Decoder
from multipack.models.huggingface import modules_of, to_huggingface
from multipack.models.peft_format import to_peft
from multipack.ops.attention.masks import mask_4d
from multipack.ops.lora import LoraLinear, add_adapters, check_adapters, initial_adapter
from multipack.shapes import ModelShape
from multipack.shapes.adapter import AdapterConfig
from multipack.shapes.config_json import config_of

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=48, vocabulary_size=50, tied=False)
LORA = AdapterConfig("lora", rank=4, alpha=6.0)
CONFIGS = {
    "lora": LORA,
    "stabilized": dataclasses.replace(LORA, rank_stabilized=True),
    "dora": dataclasses.replace(LORA, name="dora"),
    "some": dataclasses.replace(LORA, targets=["q_proj", "feed_forward.*"], train=["norm", "head"]),
}


@pytest.fixture
def batch(pack, document):
    """Two documents whose first two tokens are no targets."""
    return pack([document(11, prompt=2), document(7, 1, prompt=2)])


def adapted(config, moved=True):
    """A decoder with adapters, whose values are `moved` from the initial ones."""
    torch.manual_seed(3)
    model = Decoder(SHAPE)
    add_adapters(model, config)
    held = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in held.items():
            if name.endswith(("lora_a", "lora_b", "magnitude")):
                weight = held[f"{name.rpartition('.')[0]}.weight"]
                parameter.copy_(
                    initial_adapter(name, tuple(parameter.shape), 1, lambda weight=weight: weight)
                )
                parameter.add_(torch.randn_like(parameter), alpha=0.1 * moved)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_equal_peft(name, batch):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    model = adapted(config)
    state = {
        key: value for key, value in model.state_dict().items() if ".lora_" not in key and "magn" not in key
    }
    settings = {key: value for key, value in config_of(SHAPE).items() if key != "model_type"}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    theirs.load_state_dict(to_huggingface(SHAPE, state))
    matrices = [key for key, module in model.named_modules() if isinstance(module, LoraLinear)]
    names = {ours: theirs for theirs, (ours,), _ in modules_of(SHAPE)}
    paths = {key: names[key] for key in matrices}
    wrapped = peft.get_peft_model(
        theirs,
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=list(paths.values()),
            use_rslora=config.rank_stabilized,
            use_dora=config.name == "dora",
            modules_to_save=["model.norm", "lm_head"] if config.train else None,
        ),
    )
    pairs = {}
    for ours, path in paths.items():
        module = wrapped.base_model.model.get_submodule(path)
        pairs[f"{ours}.lora_a"] = module.lora_A["default"].weight
        pairs[f"{ours}.lora_b"] = module.lora_B["default"].weight
        if config.name == "dora":
            pairs[f"{ours}.magnitude"] = module.lora_magnitude_vector["default"].weight
    if config.train:
        inner = wrapped.base_model.model
        pairs["norm.weight"] = inner.model.norm.modules_to_save["default"].weight
        pairs["head.weight"] = inner.lm_head.modules_to_save["default"].weight
    held = dict(model.named_parameters())
    with torch.no_grad():
        for ours, parameter in pairs.items():
            parameter.copy_(held[ours].view(parameter.shape))
    loss = model.train()(batch) / batch.num_target_tokens
    loss.backward()
    ids = batch.input_ids[None]
    positions = batch.position_ids[None]
    logits = wrapped.train()(
        ids, position_ids=positions, attention_mask=mask_4d(batch, torch.float32)
    ).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, batch.targets.long(), ignore_index=-100)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    trained = {key for key, parameter in held.items() if parameter.requires_grad}
    assert trained == set(pairs)
    assert {key for key, parameter in held.items() if parameter.grad is not None} == trained
    for ours, parameter in pairs.items():
        found = held[ours].grad
        torch.testing.assert_close(found, parameter.grad.view(found.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_begin_as_the_model(name, batch):
    torch.manual_seed(3)
    plain, model = Decoder(SHAPE).eval(), adapted(CONFIGS[name], moved=False).eval()
    expected = plain.logits(batch)
    # A magnitude divided by the norm that it was made of is 1 but for rounding, in 7 products a layer and the head.
    rounding = (7 * SHAPE.layers + 1) * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(model.logits(batch), expected, rtol=0, atol=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_a_compiled_layer_computes_the_same(name):
    layer = adapted(CONFIGS[name]).blocks[0].attention.query
    x = torch.randn(13, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    trained = [each for each in layer.parameters() if each.requires_grad]
    pairs = []
    for call in (layer, torch.compile(layer)):
        out = call(x)
        pairs.append([out, *torch.autograd.grad(out.square().sum(), [x, *trained])])
    for found, expected in zip(pairs[1], pairs[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_of_adapters_and_of_training_only(batch):
    model = adapted(dataclasses.replace(LORA, dropout=0.5))
    model.eval()
    assert float(model(batch)) == float(model(batch))
    model.train()
    assert float(model(batch)) != float(model(batch))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": ["q_prj"]},
            "adapter.targets: q_prj is no matrix of a block of this model; there are q_proj",
        ),
        ({"targets": ["head"]}, "adapter.targets: head is no matrix of a block"),
        ({"train": ["lm_heads"]}, "adapter.train: lm_heads is no module of this model; there are head"),
        (
            {"train": ["blocks.0"]},
            "adapter.train trains blocks.0.attention.query whole, which adapter.targets",
        ),
    ],
)
def test_names_that_match_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_adapters(Decoder(SHAPE), dataclasses.replace(LORA, **changes))


@pytest.mark.parametrize(
    ("changes", "train", "message"),
    [
        (
            {"positions": "learned", "norm": "layernorm", "activation": "gelu", "tied": True},
            [],
            "of transformers joins",
        ),
        ({"tied": True}, ["embedding"], "adapter.train has the embedding, which is also the head"),
    ],
)
def test_adapters_that_peft_cannot_have_are_refused(changes, train, message):
    shape = dataclasses.replace(SHAPE, kv_heads=4, **changes)
    config = dataclasses.replace(LORA, train=train)
    with torch.device("meta"):
        model = Decoder(shape)
    add_adapters(model, config)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with pytest.raises(ValueError, match=message):
        to_peft(shape, config, trained, {})
