"""EAGLE-3 heads, and layers for multi-token prediction: what they propose is what the format says, computed plainly;
and the text stays the same."""

import json
from abc import ABC
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace as replace_fields
from safetensors.torch import load_file, save_file
from torch import Tensor

from charonia.core.errors import InvalidArgument
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.attention import selector
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig, SpeculationConfig
from charonia.engine.core.drafters import ProposedDrafts
from charonia.engine.models.registry import NativeBuilder
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.engine.worker.loaded_rank import check_rank_config, load_rank
from charonia.engine.worker.step_recording import record_steps
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import Speculation
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import GREEDY, SequenceSpec
from tests.engine.threads import Layout, ThreadedExecutor
from tests.quantised_files import fp8, write_quantised
from tests.recording import DeviceAttention, Recorder, compute_on_queue

LAYERS, DRAFT_VOCABULARY, MOST, BLOCK, BLOCKS, NEW = (0, 1, 1), 96, 3, 16, 40, 14
LENGTHS = (5, 33, 40, 33)


class Head:
    """A head with random weights for a target with this config.json, as a directory and computed plainly."""

    def __init__(self, directory: Path, target: dict[str, Any], **changes: Any) -> None:
        random = torch.Generator().manual_seed(3)
        layer = {name: target[name] for name in SHARED if name in target}
        layer |= {"num_hidden_layers": 1, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
        layer["head_dim"] = self.size = 16
        hidden = self.hidden = layer["hidden_size"]
        vocabulary = layer["vocab_size"]
        self.heads, self.kv_heads, self.eps = 4, 2, layer.get("rms_norm_eps", 1e-6)
        shapes = {
            "fc": (hidden, len(LAYERS) * hidden),
            "layers.0.self_attn.q_proj": (4 * 16, 2 * hidden),
            "layers.0.self_attn.k_proj": (2 * 16, 2 * hidden),
            "layers.0.self_attn.v_proj": (2 * 16, 2 * hidden),
            "layers.0.self_attn.o_proj": (hidden, 4 * 16),
            "layers.0.mlp.gate_proj": (80, hidden),
            "layers.0.mlp.up_proj": (80, hidden),
            "layers.0.mlp.down_proj": (hidden, 80),
            "lm_head": (DRAFT_VOCABULARY, hidden),
            "embed_tokens": (vocabulary, hidden),
        }
        norms = ("norm", *(f"layers.0.{one}" for one in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
        self.weights = {name: torch.randn(shape, generator=random) * shape[1] ** -0.5 for name, shape in shapes.items()}
        self.weights |= {name: 1 + 0.1 * torch.randn(hidden, generator=random) for name in norms}
        chosen = torch.randperm(vocabulary, generator=random)[:DRAFT_VOCABULARY].sort().values
        self.target_ids = chosen
        known = torch.zeros(vocabulary, dtype=torch.bool)
        known[chosen] = True
        stored = {f"{name}.weight": weight for name, weight in self.weights.items()}
        stored |= {"d2t": chosen - torch.arange(DRAFT_VOCABULARY), "t2d": known}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": LAYERS,
            "norm_before_residual": False,
            "torch_dtype": "float32",
            "transformer_layer_config": layer,
        } | changes
        self.norm_before_residual = config["norm_before_residual"]
        self.theta = 10000.0
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(stored, directory / "model.safetensors")
        self.path = str(directory)

    def proposals(self, states: Tensor, tokens: list[int], most: int) -> list[int]:
        """For the target's states [N, layers * hidden] of all tokens but the newest."""
        inputs, following, found = [*F.linear(states, self.weights["fc"])], tokens[1:], list[int]()
        while len(found) < most:
            own = self._layer(torch.stack(inputs), torch.tensor(following))[-1]
            logits = F.linear(self._norm("norm", own), self.weights["lm_head"])
            found.append(int(self.target_ids[logits.argmax()]))
            inputs.append(own)
            following.append(found[-1])
        return found

    def _layer(self, states: Tensor, following: Tensor) -> Tensor:
        normed = self._norm("layers.0.hidden_norm", states)
        embedded = self._norm("layers.0.input_layernorm", self.weights["embed_tokens"][following])
        residual = normed if self.norm_before_residual else states
        residual = residual + self._attention(torch.cat((embedded, normed), -1))
        return residual + self._mlp(self._norm("layers.0.post_attention_layernorm", residual))

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = (F.linear(x, self.weights[f"layers.0.mlp.{one}_proj"]) for one in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.weights["layers.0.mlp.down_proj"])

    def _attention(self, x: Tensor) -> Tensor:
        names = [f"layers.0.self_attn.{one}_proj" for one in "qkv"]
        q, k, v = (F.linear(x, self.weights[name], self.weights.get(f"{name}.bias")) for name in names)
        q, k, v = (each.view(len(x), -1, self.size).transpose(0, 1) for each in (q, k, v))
        q, k = self._rotate(q), self._rotate(k)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return F.linear(out.transpose(0, 1).reshape(len(x), -1), self.weights["layers.0.self_attn.o_proj"])

    def _rotate(self, x: Tensor) -> Tensor:
        half = self.size // 2
        angles = torch.arange(x.shape[1])[:, None] * self.theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weights[name]


class MtpLayer(Head):
    """A layer with random weights beside the model in `target`, in a checkpoint like MiMo's, and computed plainly."""

    def __init__(self, directory: Path, target: Path, **changes: Any) -> None:
        random = torch.Generator().manual_seed(4)
        config, stored = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
        hidden, self.size, self.eps, self.theta = 64, 16, config["rms_norm_eps"], 10000.0
        shapes = {
            "input_proj": (hidden, 2 * hidden),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (16, hidden),
            "self_attn.v_proj": (16, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (96, hidden),
            "mlp.up_proj": (96, hidden),
            "mlp.down_proj": (hidden, 96),
        }
        norms = "token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm"
        own = {
            f"{name}.weight": torch.randn(shape, generator=random) * shape[1] ** -0.5 for name, shape in shapes.items()
        }
        own |= {f"{name}.weight": 1 + 0.1 * torch.randn(hidden, generator=random) for name in norms}
        own |= {
            f"self_attn.{one}_proj.bias": torch.randn(shapes[f"self_attn.{one}_proj"][0], generator=random)
            for one in "qkv"
        }
        self.weights = {f"layers.0.{name.removesuffix('.weight')}": weight for name, weight in own.items()}
        self.weights |= {"embed_tokens": stored["model.embed_tokens.weight"], "lm_head": stored["lm_head.weight"]}
        own = {f"model.mtp_layers.0.{name}": weight for name, weight in own.items()}
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
        config |= {
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
            "attention_bias": True,
            "use_mrope": False,
        }
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config | changes))
        save_file(stored | own, directory / "model.safetensors")
        self.path = str(directory)

    def proposals(self, states: Tensor, tokens: list[int], most: int) -> list[int]:
        """For the target's last states [N, hidden], before its last norm, of all tokens but the newest."""
        inputs, following, found = [*states], tokens[1:], list[int]()
        while len(found) < most:
            own = self._norm("layers.0.final_layernorm", self._layer(torch.stack(inputs), torch.tensor(following)))[-1]
            found.append(int(F.linear(own, self.weights["lm_head"]).argmax()))
            inputs.append(own)
            following.append(found[-1])
        return found

    def _layer(self, states: Tensor, following: Tensor) -> Tensor:
        embedded = self._norm("layers.0.token_layernorm", self.weights["embed_tokens"][following])
        joined = torch.cat((self._norm("layers.0.hidden_layernorm", states), embedded), -1)
        residual = F.linear(joined, self.weights["layers.0.input_proj"])
        residual = residual + self._attention(self._norm("layers.0.input_layernorm", residual))
        return residual + self._mlp(self._norm("layers.0.post_attention_layernorm", residual))


class PublishedMtpLayer(ABC):
    """A layer with random weights beside the model in `target`, in a checkpoint as its family publishes them; what it
    makes of states says transformers' block, of a model that has one layer."""

    norm_offset: float
    """Added to the weights of norms."""
    names: ClassVar[tuple[str, str, str, str, str]]
    """Of the matrix, the norms of tokens and of states, what the names of the block begin with, and the last norm; with
    {layers} for the number of the model's layers."""
    sizes: Mapping[str, Any]
    """What config.json says of the one layer."""

    def __init__(self, directory: Path, target: Path, silent: bool = False, **changes: Any) -> None:
        """`silent`: nothing is added to the residual stream, in the model neither: what follows a token depends on that
        token alone, and the matrix passes it on."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(target)
        written = json.loads((target / "config.json").read_text())
        join, of_tokens, of_states, block, last = (name.format(layers=config.num_hidden_layers) for name in self.names)
        for name in ("layer_types", "indexer_types"):
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name)[:1])
        for name, value in self.sizes.items():
            setattr(config, name, value)
        torch.manual_seed(4)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.block = model.model
        stored = load_file(target / "model.safetensors")
        hidden = config.hidden_size
        own = {name: 1 - self.norm_offset + torch.randn(hidden) * 0.1 for name in (of_tokens, of_states)}
        own[join] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
        if silent:
            own[join] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
            own[of_tokens] = torch.full((hidden,), 1 - self.norm_offset)
            stored = {name: weight * 0 if name.endswith(SILENCED) else weight for name, weight in stored.items()}
            self.block.norm.weight.data.copy_(stored["model.norm.weight"])
            for name, weight in model.state_dict().items():
                if name.endswith(SILENCED):
                    weight.zero_()
        self.joined, self.of_tokens, self.of_states = (own[name] for name in (join, of_tokens, of_states))
        self.ends = [stored[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head")]
        directory.mkdir(exist_ok=True)
        model.save_pretrained(directory)
        layer = load_file(directory / "model.safetensors")
        beginnings = {"model.layers.0.": block, "model.norm.": f"{last}."}
        named = {
            there + name.removeprefix(here): weight
            for name, weight in layer.items()
            for here, there in beginnings.items()
            if name.startswith(here)
        }
        named |= {f"{name}.weight": weight for name, weight in own.items()}
        (directory / "config.json").write_text(json.dumps(written | changes))
        save_file(stored | named, directory / "model.safetensors")
        self.path = str(directory)

    @torch.inference_mode()
    def proposals(self, states: Tensor, tokens: list[int], most: int) -> list[int]:
        """For the target's last states [N, hidden], after its last norm, of all tokens but the newest."""
        inputs, following, found = [*states], tokens[1:], list[int]()
        embedding, head = self.ends
        while len(found) < most:
            embedded = self._norm(self.of_tokens, embedding[following])
            joined = torch.cat((embedded, self._norm(self.of_states, torch.stack(inputs))), -1)
            mixed = F.linear(joined, self.joined)
            own = self.block(inputs_embeds=mixed[None]).last_hidden_state[0, -1]
            found.append(int(F.linear(own, head).argmax()))
            inputs.append(own)
            following.append(found[-1])
        return found

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (self.norm_offset + weight)


SILENCED = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


class QwenMtpLayer(PublishedMtpLayer):
    norm_offset = 1.0
    names = "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.layers.0.", "mtp.norm"
    sizes: Mapping[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


_BEHIND = "model.layers.{layers}."


class LastMtpLayer(PublishedMtpLayer):
    """Of GLM-4.5 and DeepSeek V3."""

    norm_offset = 0.0
    names = f"{_BEHIND}eh_proj", f"{_BEHIND}enorm", f"{_BEHIND}hnorm", _BEHIND, f"{_BEHIND}shared_head.norm"
    sizes: Mapping[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}


SHARED = ("model_type", "hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act")


def config_of(target: Path, head: Head, **config: Any) -> EngineConfig:
    speculation = SpeculationConfig(method="eagle3", model=head.path, num_speculative_tokens=MOST)
    return EngineConfig(
        model=str(target), device="cpu", cache=CacheConfig(block_size=BLOCK), speculation=speculation, **config
    )


@pytest.fixture(scope="module")
def target(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return Head(tmp_path_factory.mktemp("head"), json.loads((target / "config.json").read_text()))


@pytest.fixture(scope="module")
def qwen(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2")


@pytest.fixture(scope="module")
def mimo(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> MtpLayer:
    return MtpLayer(tmp_path_factory.mktemp("mimo"), qwen)


def with_mtp(mimo: MtpLayer | PublishedMtpLayer, **config: Any) -> EngineConfig:
    speculation = SpeculationConfig(method="mtp", num_speculative_tokens=MOST)
    cache = CacheConfig(block_size=BLOCK)
    return EngineConfig(model=mimo.path, device="cpu", cache=cache, speculation=speculation, **config)


def run(
    config: EngineConfig,
    sampling: ResolvedSampling = GREEDY,
    most: int = MOST,
    before_step: Callable[[InlineExecutor], None] = lambda _: None,
    ranks: int = 1,
) -> tuple[list[list[int]], list[tuple[int, int, list[int]]]]:
    """Whole texts, and proposals: which text, how much of it was known, and what was proposed."""
    executor: Any = InlineExecutor(config) if ranks == 1 else ThreadedExecutor(config, Layout(ranks))
    executor.load(lambda phase, fraction: None)
    shape = executor.rank.shape if ranks == 1 else executor.engines[0].shape
    states = 4 * MOST if any(shape.states) else 0
    executor.allocate(BLOCKS, snapshots=2 * states)
    cache = KVCacheManager(BLOCKS, BLOCK, snapshots=states, draft_states=states or None)
    speculation = Speculation({"eagle3": ProposedDrafts()}, most, 384, draft_model=True)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=3), cache, speculation=speculation)
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 384, length).astype(np.int32) for length in LENGTHS]
    prompts[-1] = prompts[1]  # it waits for a row, and finds the other's blocks
    for key, prompt in enumerate(prompts):
        hashes = cache.digest(prompt)
        scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=NEW, hashes=hashes, sampling=sampling))
    texts: list[list[int]] = [prompt.tolist() for prompt in prompts]
    found, keys = list[tuple[int, int, list[int]]](), dict[int, int]()
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        for new in plan.new:
            keys[new.row] = next(
                key for key, text in enumerate(texts) if text[: len(new.tokens)] == new.tokens.tolist()
            )
        before_step(executor)
        result = executor.execute(plan).result()
        tokens = iter(result.proposals.tokens.tolist())
        for row, position, count in zip(*(proposal.tolist() for proposal in result.proposals[:3]), strict=True):
            found.append((keys[row], position, [next(tokens) for _ in range(count)]))
        updates = scheduler.apply(result)
        stream = iter(updates.tokens)
        for key, count in zip(updates.keys, updates.counts, strict=True):
            texts[key] += [next(stream) for _ in range(count)]
    scheduler.check_integrity()
    executor.close()
    return texts, found


def target_states(target: Path, text: list[int]) -> Tensor:
    """[N, layers * hidden] by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], -1)


@pytest.mark.parametrize(
    ("config", "changes"),
    [({}, {}), ({"attention": "reference"}, {"norm_before_residual": True})],
    ids=["programs", "torch"],
)
def test_a_head_proposes_what_the_format_says(
    target: Path, tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    head = Head(tmp_path, json.loads((target / "config.json").read_text()), **changes)
    texts, found = run(config_of(target, head, **config))
    states = [target_states(target, text) for text in texts]
    assert len(found) > len(LENGTHS) * NEW // (MOST + 1)
    assert {len(proposed) for _, _, proposed in found} >= {1, MOST}
    for key, known, proposed in found:
        expected = head.proposals(states[key][: known - 1], texts[key][:known], len(proposed))
        assert proposed == expected, (key, known)


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
    ids=lambda config: config.get("quantization", config["dtype"]),
)
def test_a_head_changes_no_text(target: Path, head: Head, config: dict[str, Any]) -> None:
    plain = EngineConfig(model=str(target), device="cpu", cache=CacheConfig(block_size=BLOCK), **config)
    for sampling in (GREEDY, ResolvedSampling(0.8, 20, 0.9, seed=4)):
        texts, found = run(config_of(target, head, **config), sampling)
        assert found
        assert texts == run(plain, sampling, 0)[0]


@pytest.mark.parametrize("config", [{}, {"attention": "reference"}], ids=["programs", "torch"])
def test_whatever_its_cache_holds_changes_no_text(target: Path, head: Head, config: dict[str, Any]) -> None:
    """Blocks of a prefix hit, for which nothing was proposed, have what was in them before: at worst no numbers."""

    def spoil(executor: InlineExecutor) -> None:
        assert executor.rank.runner.draft is not None
        for view in executor.rank.runner.draft.attention.device_blocks:
            view.fill_(torch.nan if view.is_floating_point() else 255)

    plain = EngineConfig(model=str(target), device="cpu", cache=CacheConfig(block_size=BLOCK), **config)
    texts, found = run(config_of(target, head, **config), before_step=spoil)
    assert found
    assert texts == run(plain, most=0)[0]


def test_the_demos_head_is_often_right(root: Path) -> None:
    speculation = SpeculationConfig(method="eagle3", model=str(root / "examples/eagle3"), num_speculative_tokens=MOST)
    demo = str(root / "examples/model_repository/demo/1")
    cache = CacheConfig(block_size=BLOCK)
    texts, found = run(EngineConfig(model=demo, device="cpu", dtype="float32", cache=cache, speculation=speculation))
    right = [texts[key][known] == proposed[0] for key, known, proposed in found]
    assert sum(right) > len(right) / 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculators_model_type": "eagle"}, "no EAGLE-3 head in the format of speculators"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, r"must be layers of the model, 0 to 1, got \[0, 2\]"),
        ({"target_hidden_size": 128}, "made for hidden states of another size than the model's 64"),
        ({"fc_norm": True}, "fc_norm is not served"),
        ({"draft_vocab_size": 400}, "draft_vocab_size must be 1 to 384, got 400"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(target: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    config = config_of(target, Head(tmp_path, json.loads((target / "config.json").read_text()), **changes))
    for load in (load_rank, check_rank_config):
        with pytest.raises(InvalidArgument, match=says) as refusal:
            load(config)
        assert refusal.value.field == "speculative_config"


def test_a_head_needs_the_states_of_the_last_step(target: Path, head: Head) -> None:
    config = config_of(target, head, scheduler=SchedulerConfig(ahead=1))
    with pytest.raises(InvalidArgument, match="which ahead takes from it"):
        load_rank(config)


def assert_text_and_proposals(
    model: Any,
    states: list[Tensor],
    texts: list[list[int]],
    found: list[tuple[int, int, list[int]]],
    layer: MtpLayer | PublishedMtpLayer,
) -> None:
    """The texts are the greedy ones of transformers' `model`, and what was `found` to be proposed is the layer's.
    `states`: a hook of the model appends to it what the layer reads."""
    with torch.inference_mode():
        chosen = [model(torch.tensor([text])).logits[0].argmax(-1).tolist() for text in texts]
    for text, length, likeliest in zip(texts, LENGTHS, chosen, strict=True):
        assert text[length:] == likeliest[length - 1 : -1]
    assert {len(proposed) for _, _, proposed in found} >= {1, MOST}
    for key, known, proposed in found:
        assert proposed == layer.proposals(states[key][: known - 1], texts[key][:known], len(proposed)), (key, known)


@pytest.mark.parametrize("config", [{}, {"attention": "reference"}], ids=["programs", "torch"])
def test_a_layer_for_multi_token_prediction_proposes_what_its_weights_say(
    qwen: Path, mimo: MtpLayer, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The text beside it is that of Qwen 2 by transformers, with the same weights."""
    from transformers import AutoModelForCausalLM

    texts, found = run(with_mtp(mimo, **config))
    assert "knows nothing of" not in caplog.text
    model, states = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32), list[Tensor]()
    model.model.norm.register_forward_pre_hook(lambda module, given: states.append(given[0][0]))
    assert_text_and_proposals(model, states, texts, found, mimo)


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "float32", "attention": "reference"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
    ],
    ids=["torch", "bfloat16", "int8"],
)
def test_a_layer_for_multi_token_prediction_changes_no_text(mimo: MtpLayer, config: dict[str, Any]) -> None:
    plain = EngineConfig(model=mimo.path, device="cpu", cache=CacheConfig(block_size=BLOCK), **config)
    for sampling in (GREEDY, ResolvedSampling(0.8, 20, 0.9, seed=4, prompt_logprobs=1)):
        texts, found = run(with_mtp(mimo, **config), sampling)
        assert found
        assert texts == run(plain, sampling, 0)[0]


@pytest.mark.parametrize(
    ("name", "kind", "config"),
    [
        pytest.param("qwen3.5", QwenMtpLayer, {}, id="programs"),
        pytest.param("qwen3.5-moe", QwenMtpLayer, {"attention": "reference"}, id="torch", marks=pytest.mark.proof),
        pytest.param("qwen3-next", QwenMtpLayer, {}, id="next", marks=pytest.mark.proof),
        pytest.param("glm4-moe", LastMtpLayer, {}, id="glm"),
        pytest.param("deepseek-v3", LastMtpLayer, {}, id="deepseek"),
        pytest.param("glm4-lite", LastMtpLayer, {"attention": "reference"}, id="flash", marks=pytest.mark.proof),
        pytest.param("deepseek-v3.2", LastMtpLayer, {}, id="indexer", marks=pytest.mark.proof),
        pytest.param("glm5", LastMtpLayer, {"attention": "reference"}, id="glm5", marks=pytest.mark.proof),
    ],
)
def test_a_published_layer_proposes_what_transformers_says(
    name: str,
    kind: type[PublishedMtpLayer],
    config: dict[str, Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It attends, and keeps no state; the model's, if it has some, are those after accepted tokens."""
    from transformers import AutoModelForCausalLM

    target = checkpoint(name)
    layer = kind(tmp_path / "mtp", target, num_nextn_predict_layers=1)
    texts, found = run(with_mtp(layer, **config))
    assert "knows nothing of" not in caplog.text
    model, states = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), list[Tensor]()
    model.model.norm.register_forward_hook(lambda module, given, normed: states.append(normed[0]))
    assert_text_and_proposals(model, states, texts, found, layer)


def test_a_layer_of_a_model_with_states_changes_no_text(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    layer = QwenMtpLayer(tmp_path / "mtp", checkpoint("qwen3.5"))
    quantised = {"dtype": "bfloat16", "quantization": "int8"}
    plain = EngineConfig(model=layer.path, device="cpu", cache=CacheConfig(block_size=BLOCK), **quantised)
    for sampling in (GREEDY, ResolvedSampling(0.8, 20, 0.9, seed=4, prompt_logprobs=1)):
        texts, found = run(with_mtp(layer, **quantised), sampling)
        assert found
        assert texts == run(plain, sampling, 0)[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("glm4-moe", LastMtpLayer), pytest.param("qwen3.5", QwenMtpLayer, marks=pytest.mark.proof)],
)
def test_a_layer_drafts_where_ranks_share_the_model(
    name: str, kind: type[PublishedMtpLayer], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """It is whole on the rank that proposes."""
    layer = kind(tmp_path / "mtp", checkpoint(name), num_nextn_predict_layers=1)
    alone = run(with_mtp(layer))
    config = with_mtp(layer, parallel=ParallelConfig(tensor=2))
    check_rank_config(config)
    assert run(config, ranks=2) == alone


def test_a_layer_stored_in_fp8_drafts(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    layer = LastMtpLayer(tmp_path / "mtp", checkpoint("deepseek-v3"), num_nextn_predict_layers=1)
    small, plain = write_quantised(Path(layer.path), tmp_path, fp8())
    assert "model.layers.2.eh_proj.weight_scale_inv" in load_file(small / "model.safetensors")
    config = replace_fields(with_mtp(layer), dtype="float32")
    assert run(replace_fields(config, model=str(small))) == run(replace_fields(config, model=str(plain)))


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_what_a_layer_can_say_is_accepted(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Where a token alone decides what follows, the layer says the same as the model."""
    layer = LastMtpLayer(tmp_path / "mtp", checkpoint(name), silent=True, num_nextn_predict_layers=1)
    texts, found = run(with_mtp(layer))
    assert texts == run(replace_fields(with_mtp(layer), speculation=None), most=0)[0]
    assert len({tuple(text[-NEW:]) for text in texts}) > 1
    right = [
        texts[key][known : known + len(proposed)] == proposed[: len(texts[key]) - known]
        for key, known, proposed in found
    ]
    assert all(right)
    assert len(found) < len(LENGTHS) * NEW / 2


def test_a_model_without_the_layer_that_its_family_has_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    target = checkpoint("qwen3.5")
    layer = QwenMtpLayer(tmp_path / "mtp", target)
    with pytest.raises(InvalidArgument, match="it has no tensors of a layer for multi-token prediction"):
        load_rank(replace_fields(with_mtp(layer), model=str(target)))
    for field, value, says in (
        ("mtp_num_hidden_layers", 2, "mtp_num_hidden_layers must be 1 for the method mtp, got 2"),
        ("mtp_use_dedicated_embeddings", True, "mtp_use_dedicated_embeddings is not served"),
    ):
        other = QwenMtpLayer(tmp_path / field, target, **{field: value})
        with pytest.raises(InvalidArgument, match=says):
            check_rank_config(with_mtp(other))


def test_what_has_no_such_layer_is_refused(
    qwen: Path, mimo: MtpLayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a check, and by a load before it reads weights, which may take minutes."""
    monkeypatch.setattr(NativeBuilder, "build", lambda *_: pytest.fail("weights are read"))
    config = with_mtp(mimo)
    three = MtpLayer(tmp_path / "three", qwen, num_nextn_predict_layers=3)
    for wrong, says in (
        (replace_fields(config, model=str(qwen)), "mtp is for checkpoints with layers for it"),
        (with_mtp(three), "num_nextn_predict_layers must be 1 for the method mtp, got 3"),
        (with_mtp(mimo, scheduler=SchedulerConfig(ahead=1)), "which ahead takes from it"),
    ):
        for refusing in (check_rank_config, load_rank):
            with pytest.raises(InvalidArgument, match=says) as refusal:
                refusing(wrong)
            assert refusal.value.field == "speculative_config"


def test_a_head_goes_on_from_the_states_of_replayed_steps(
    target: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with drafts, too, once all graphs are captured."""
    monkeypatch.setitem(selector.BACKENDS, "device", DeviceAttention)
    config = config_of(target, head, attention="device", scheduler=SchedulerConfig(max_num_seqs=3))
    launched, recorder, eager = run(config), Recorder(), list[int]()

    def record(executor: InlineExecutor) -> None:
        rank = executor.rank
        if rank.runner.computer.graphs is None:
            rank.rows._lines = 3  # as on a GPU, where tables stay
            computer = compute_on_queue(rank)
            executor.allocate(BLOCKS)
            record_steps(config, rank.context, computer, rank.runner.draft, recorder)
            while any(graph.capture_one() for graph in rank.runner.all_graphs):
                pass
        eager.append(sum(graphs.eager_steps.total() for graphs in executor.rank.runner.all_graphs))

    assert run(config, before_step=record) == launched
    assert recorder.replays > 5
    assert eager[-1] == 0
