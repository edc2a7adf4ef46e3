"""The config of a run: what is refused, how it is said, and what comes of presets and overrides."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_cases import TINY, cadenza, config_file, steps, trained

from cadenza.run.agentic_config import AgenticConfig
from cadenza.run.config import ConfigError
from cadenza.run.config_file import build_config, dump_config, read_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


def refusal(overrides: list[str], **changes: Any) -> str:
    """What is said of a config."""
    with pytest.raises(ConfigError) as caught:
        build_config({**copy.deepcopy(TINY), **changes}, overrides, source="run.yaml")
    return str(caught.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_config_and_short(path: Path) -> None:
    config = read_config(path)
    assert build_config(dump_config(config)) == config.model_copy(update={"preset": None})
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40


# -- layers ------------------------------------------------------------------------------------------------------------


def test_the_command_line_goes_over_the_file_and_the_file_over_the_preset() -> None:
    values = {**TINY, "preset": "dapo", "actor": {"lr": 0.5, "clip_high": 0.4}}
    config = build_config(values)
    assert (config.actor.clip_high, config.actor.lr) == (0.4, 0.5)
    assert config.rollout.group_filter == "cadenza.run.filters:has_variance"
    config = build_config(values, ["actor.clip_high=0.3", "rollout.group_filter=null"])
    assert (config.actor.clip_high, config.actor.lr) == (0.3, 0.5)
    assert config.rollout.group_filter is None


def test_a_later_override_wins_and_the_values_given_stay_as_they_were() -> None:
    values = copy.deepcopy(TINY)
    assert build_config(values, ["actor.lr=1", "actor.lr=2", "actor={lr: 3}"]).actor.lr == 3
    assert values == TINY


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.kind=sglang"], "engine.kind: Input should be 'torch', 'vllm' or 'http', or 'module:name'"),
        (["engine.python=python3"], "engine: python does nothing with kind 'torch', it is for 'vllm': remove it"),
        (["engine.kind=vllm", "engine.threads=2"], "engine: threads does nothing with kind 'vllm', it is for 'torch'"),
        (["engine.kind=http"], "engine: kind 'http' needs servers: give it some, as servers: [{url:"),
        (["engine.kind=http", "engine.servers=[{url: localhost}]"], "engine.servers.0.url: "),
        (["engine.kind=vllm"], "engine.kind 'vllm' needs backend 'ray', got 'embedded'"),
        (["engine.kind=vllm", "backend=ray"], "engine.kind 'vllm' needs a model.path: a tiny policy is built for"),
        (
            ["engine.kind=http", "engine.servers=[{url: http://x}]", "backend=ray"],
            "engine.kind 'http' needs backend 'embedded', got 'ray'",
        ),
    ],
)
def test_an_engine_is_told_nothing_that_it_does_not_heed(overrides: list[str], said: str) -> None:
    assert said in refusal(overrides)


CHECKPOINT = {**TINY, "model": {"path": "some/model"}, "cold_start": None}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["engine.kind=vllm", "backend=ray", "devices.inference={devices: 0-3, tensor_parallel: 2}"],
            "one worker of vLLM drives all devices of its replica: set devices_per_worker=2",
        ),
        (
            ["engine.kind=http", "engine.servers=[{url: http://x}]", "devices.inference=1"],
            "devices.inference does nothing with engine.kind 'http'",
        ),
        (
            ["engine.kind=http", "engine.servers=[{url: http://x}]", "model.lora={r: 4}"],
            "model.lora does not go with engine.kind 'http'",
        ),
    ],
)
def test_an_engine_gets_a_model_and_devices_that_it_can_use(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(CHECKPOINT, overrides)
    assert said in str(caught.value)


def test_an_engine_is_chosen_by_its_kind() -> None:
    vllm = build_config(
        CHECKPOINT, ["engine.kind=vllm", "backend=ray", "engine.python=/x/python", "engine.options={seed: 3}"]
    )
    assert (vllm.engine.python, vllm.engine.options) == ("/x/python", {"seed": 3})
    build_config(dump_config(vllm), ["devices.inference={devices: 0-3, devices_per_worker: 2}"])
    assert build_config(dump_config(vllm)).engine == vllm.engine
    served = build_config(CHECKPOINT, ["engine.kind=http", "engine.servers=[{url: 'http://x:1'}, {url: 'http://x:2'}]"])
    assert [server.url for server in served.engine.servers] == ["http://x:1", "http://x:2"]


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("steps=5", "steps", 5),
        ("actor.lr=3e-4", "actor.lr", 3e-4),
        ("name=a=b", "name", "a=b"),
        ("target=null", "target", None),
        ("validation={every: 3, episodes: 2}", "validation.episodes", 2),
        ("validation.every=3", "validation.every", 3),
        ("envs.domains.lake.env_args.map=[SG]", "envs.domains.lake.env_args", {"map": ["SG"], "max_steps": 4}),
        ("actor.correction=off", "actor.correction", "off"),
        ("trackers=[wandb]", "trackers", ("wandb",)),
        ("trackers=wandb", "trackers", ("wandb",)),
        ("trackers=[tensorboard, 'my.module:Own']", "trackers", ("tensorboard", "my.module:Own")),
        ("trackers=[]", "trackers", ()),
    ],
)
def test_an_override_is_yaml_at_its_place(override: str, place: str, value: object) -> None:
    found: Any = build_config(TINY, [override])
    for part in place.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value


@pytest.mark.parametrize("text", ["steps", "=5", "a..b=1", ".steps=5", "steps.=5"])
def test_an_override_without_key_or_value(text: str) -> None:
    assert refusal([text]) == f"'{text}' is not an override; write key=value, as in rollout.alpha=1"


def test_an_override_whose_value_is_no_yaml() -> None:
    said = refusal(["actor={lr: "])
    assert "the value of 'actor={lr: ' is not YAML" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("preset", AgenticConfig.presets)
def test_a_preset_is_resolved_in_what_is_written(preset: str) -> None:
    teacher = {"reference": {"path": "some/model"}} if preset == "distill" else {}
    config = build_config({**TINY, "preset": preset, **teacher})
    written = dump_config(config)
    assert "preset" not in written
    assert build_config(written) == config.model_copy(update={"preset": None})
    assert build_config(yaml.safe_load(yaml.safe_dump(written))) == build_config(written)


def test_grpo_averages_sequences_and_dr_grpo_divides_by_the_longest_there_may_be() -> None:
    assert build_config(TINY, ["preset=grpo"]).actor.aggregation == "sequence_mean"
    actor = build_config(TINY, ["preset=dr-grpo", "envs.sampling.max_tokens=5"]).actor
    assert (actor.aggregation, actor.constant_length) == ("sequence_sum", 5), "a row is one turn"
    whole = ["preset=dr-grpo", "envs.rollout=trajectory", "envs.sampling.max_tokens=5"]
    assert build_config(TINY, [*whole, "envs.max_turns=4"]).actor.constant_length == 20
    assert build_config(TINY, [*whole, "actor.constant_length=7"]).actor.constant_length == 7
    joined = ["preset=dr-grpo", "actor.sequence=trajectory", "envs.max_turns=4"]
    assert build_config(TINY, joined).actor.constant_length == 4, "a sequence is all rows of a trajectory"


@pytest.mark.parametrize("override", ["envs.rollout=trajectory", "actor.sequence=trajectory"])
def test_dr_grpo_asks_for_the_length_that_it_cannot_know(override: str) -> None:
    text = refusal(["preset=dr-grpo", override])
    assert "actor.aggregation 'sequence_sum' divides by the most tokens that a sequence may have" in text
    assert "set actor.constant_length, or envs.max_turns" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["preset=ppo", "estimator.name=grpo"],
        ["preset=dr-grpo", "estimator.name=rloo"],
        ["preset=dapo", "actor.loss=policy_gradient"],
        ["preset=dr-grpo", "actor.aggregation=token_mean"],
        ["preset=grpo", "actor.aggregation=sequence_sum"],
        ["preset=ppo", "estimator.name=gae", "critic.lr=0.1"],
    ],
)
def test_what_a_preset_sets_is_in_nobodys_way(overrides: list[str]) -> None:
    config = build_config(TINY, overrides)
    assert build_config(dump_config(config)) == config.model_copy(update={"preset": None})
    assert (config.critic is not None) is (config.estimator.name == "gae")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stepz=5", "run.yaml: AgenticConfig has no key 'stepz'; did you mean 'steps'?"),
        ("actor.lrr=1", "run.yaml: actor: ActorConfig has no key 'lrr'; did you mean 'lr'?"),
        ("rollout.groupsize=4", "rollout: RolloutConfig has no key 'groupsize'; did you mean 'group_size'?"),
        ("envs.slot=4", "envs: EnvManagerConfig has no key 'slot'; did you mean 'slots'?"),
        ("envs.sampling.top_q=1", "envs.sampling: Sampling has no key 'top_q'; did you mean 'top_p'?"),
        ("envs.domains.lake.task=4", "envs.domains.lake: DomainConfig has no key 'task'; did you mean 'tasks'?"),
        ("model.lora.rr=4", "model.lora: LoraConfig has no key 'rr'; known keys: r, alpha"),
        ("actor.lerning_rate=1", "actor: ActorConfig has no key 'lerning_rate'; did you mean 'lr'?"),
        ("actor.lernrate=1", "actor: ActorConfig has no key 'lernrate'; known keys: "),
        ("lr=1", "AgenticConfig has no key 'lr'; did you mean 'actor.lr', 'critic.lr' or 'cold_start.trainer.lr'?"),
        ("group_size=4", "AgenticConfig has no key 'group_size'; did you mean 'rollout.group_size'?"),
        ("groupsize=4", "AgenticConfig has no key 'groupsize'; did you mean 'rollout.group_size'?"),
        ("max_tokens=4", "'envs.sampling.max_tokens' or"),
        ("env=frozenlake", "'envs.domains.NAME.env'?"),
        ("lam=0.9", "did you mean 'estimator.lam'?"),
        (
            "envs.temperature=1",
            "envs: EnvManagerConfig has no key 'temperature'; did you mean 'sampling.temperature' or",
        ),
        ("xyz=1", "AgenticConfig has no key 'xyz'; known keys: pipeline, name, "),
        ("cold_start.trainer.batchsize=4", "SupervisedConfig has no key 'batchsize'; did you mean 'batch_size'?"),
        ("validation.episode=4", "validation: AgenticValidationConfig has no key 'episode'; did you mean 'episodes'?"),
        ("checkpoint.keeps=4", "checkpoint: CheckpointConfig has no key 'keeps'; did you mean 'keep'?"),
        ("engine.kv_token=4", "engine: EngineConfig has no key 'kv_token'; did you mean 'kv_tokens'?"),
        ("tokenizer.systems=x", "tokenizer: TokenizerConfig has no key 'systems'; did you mean 'system'?"),
        ("estimator.gama=1", "estimator: EstimatorConfig has no key 'gama'; did you mean 'gamma'?"),
        ("sampler.retries=1", "sampler: SamplerConfig has no key 'retries'"),
        ("preset=grppo", "run.yaml: preset 'grppo' is not known; there are grpo, dr-grpo"),
        ("preset=dpo", "preset 'dpo' is not known; there are grpo, dr-grpo, dapo"),
        ("preset=xyz", "preset 'xyz' is not known; there are grpo, dr-grpo, dapo"),
        ("preset=[grpo]", "preset '['grpo']' is not known"),
    ],
)
def test_an_unknown_name_gets_the_nearest_known_one(override: str, said: str) -> None:
    text = refusal([override])
    assert said in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("steps=many", "run.yaml: steps: ", "'many'"),
        ("steps=0", "steps: ", "0"),
        ("seed=-1", "seed: ", "-1"),
        ("target=1.5", "target: ", "1.5"),
        ("actor.lr=fast", "actor.lr: ", "'fast'"),
        ("rollout=5", "rollout: ", "5"),
        ("envs.domains.lake.tasks=all", "envs.domains.lake.tasks: ", "'all'"),
        ("envs.domains.lake.env=[x]", "envs.domains.lake.env: ", "['x']"),
        ("trackers=[csv]", "trackers.0: ", "'csv'"),
        ("model.dtype=float8", "model.dtype: ", "'float8'"),
        ("validation=true", "validation: ", "True"),
        ("name=null", "name: ", "None"),
        ("actor.lr=.nan", "actor.lr: ", "nan"),
        ("name=../evil", "name: must be the name of one directory below out", "'../evil'"),
        ("name=a/b", "name: must be", "'a/b'"),
        ("name=/tmp/evil", "name: must be", "'/tmp/evil'"),
        ("name=..", "name: must be", "'..'"),
        ("name=.", "name: must be", "'.'"),
        ("name=''", "name: must be", "''"),
        (r"name=a\b", "name: must be", r"'a\\b'"),
        ("threads=1000000", "threads: Input should be less than or equal to 1024", "1000000"),
        ("engine.threads=1000000", "engine.threads: Input should be less than or equal to 1024", "1000000"),
        (f"seed={2**64}", f"seed: Input should be less than or equal to {2**62}", str(2**64)),
        (f"validation.first_seed={2**64}", "validation.first_seed: Input should be less", str(2**64)),
    ],
)
def test_a_wrong_value_is_named_with_its_place(override: str, place: str, value: str) -> None:
    text = refusal([override])
    assert place in text
    assert f"(got {value})" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("override", ["envs.domains={}", "envs={domains: {}}"])
def test_an_empty_mapping_replaces_what_the_file_says(override: str) -> None:
    assert "envs.domains: Dictionary should have at least 1 item" in refusal([override])
    lake = build_config(TINY, ["envs.domains.lake.env_args={}"]).envs.domains["lake"]
    assert lake.env_args == {}


def test_an_empty_section_leaves_what_a_preset_sets() -> None:
    assert build_config({**TINY, "preset": "gigpo", "estimator": {}}).estimator.name == "gigpo"


def test_all_wrong_values_are_told_at_once() -> None:
    text = refusal(["steps=0", "seed=-1", "actor.lr=x"])
    assert [line.split(": ")[1] for line in text.splitlines()] == ["seed", "steps", "actor.lr"]


def test_what_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"steps: Field required"):
        build_config({"envs": TINY["envs"], "rollout": TINY["rollout"]})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["estimator.name=gae"], "estimator 'gae' needs a critic: add 'critic: {}'"),
        (["critic={}"], "critic does nothing for the estimator 'grpo': remove it"),
        (["reference={}"], "reference does nothing while no kl_coef is set"),
        (["actor.temperature=0.5"], "actor.temperature 0.5 is not that of sampling, 1.0: leave it out"),
        (["seed=1", "rollout.seed=2"], "rollout.seed 2 differs from seed 1: set seed alone"),
        (["rollout.batch_size=6"], "batch_size must be a multiple of group_size 4, got 6; take 4 or 8"),
        (["rollout.group_size=1"], "compares the members of a group: set rollout.group_size to 2 or more, got 1"),
        (["preset=gigpo", "rollout.group_size=1"], "'gigpo' compares the members of a group"),
        (["model.lora={}"], "lora needs a path"),
        (["estimator.lam=0.5"], "lam does nothing for 'grpo', only for 'gae': remove it"),
        (["actor.correction=token", "actor.old_logprobs=infer"], "use one of them"),
        (["model.hidden=30", "model.heads=4"], "hidden must be heads times an even number, got 30 for 4 heads"),
        (["actor.mini_batches=9"], "actor.mini_batches must be at most rollout.batch_size 8, got 9"),
        (["preset=ppo", "critic.mini_batches=9"], "critic.mini_batches must be at most rollout.batch_size 8, got 9"),
        (
            ["actor.kl_coef=0.1", "reference.temperature=0.5"],
            "reference.temperature 0.5 is not that of sampling, 1.0: leave it out",
        ),
        (["model.path=x"], "model: layers=1 does nothing with the path 'x'"),
        (["critic.aggregation=sequence_sum", "preset=ppo"], "'sequence_sum' needs constant_length"),
        (["cold_start.trainer.aggregation=sequence_sum"], "'sequence_sum' needs constant_length"),
        (["batch_parts=3"], "batch_parts must be at most the groups of a batch, 2, got 3"),
        (
            ["batch_parts=2", "actor.epochs=2"],
            "the actor makes 2 of them: leave actor.epochs and actor.mini_batches at 1",
        ),
        (["batch_parts=2", "actor.mini_batches=2"], "or set batch_parts=1"),
        (["batch_parts=2", "preset=ppo"], "a critic is trained on whole batches: take an estimator without critic"),
        (["batch_parts=2", "preset=reinforce++"], "estimator.name='reinforce++' may need all groups at once: take one"),
        (
            ["batch_parts=2", "estimator.name=reinforce++-baseline"],
            "estimator.name='reinforce++-baseline' may need all",
        ),
        (
            ["batch_parts=2", "preset=step", "estimator.over=batch"],
            "estimator.over='batch' may need all groups at once",
        ),
        (
            ["batch_parts=2", "estimator.score_norm=running", "estimator.score_clip=2"],
            "estimator.score_norm='running' may need all groups at once: take one that compares within groups",
        ),
        (["batch_parts=2", "estimator.name=json:dumps"], "estimator.name='json:dumps' may need all groups at once"),
    ],
)
def test_settings_that_contradict_each_other(overrides: list[str], said: str) -> None:
    text = refusal(overrides)
    assert said in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(("parts", "sizes"), [(1, [28]), (2, [12, 16]), (3, [8, 8, 12]), (7, [4] * 7)])
def test_parts_of_a_batch_are_whole_groups_and_as_even_as_these_allow(parts: int, sizes: list[int]) -> None:
    config = build_config(TINY, ["rollout.batch_size=28", f"batch_parts={parts}"])
    assert config.chunk_sizes == sizes


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo", "step"])
def test_estimators_that_compare_within_groups_go_with_parts(name: str) -> None:
    assert build_config(TINY, [f"estimator.name={name}", "batch_parts=2"]).chunk_sizes == [4, 4]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("devices.acter=0", "this run has no role 'acter'; it has actor, inference"),
        ("devices.critic=0", "this run has no role 'critic'"),
        ("devices.actor=0-1", "devices.actor: 0-1 are 2 ranks that compute together, each in a process of its own"),
        ("devices.actor={devices: 0-1, tensor_parallel: 2}", "set backend=ray, or name one device"),
        ("actor.strategy=fsdp2", "actor.strategy 'fsdp2' needs ranks in processes of their own: set backend=ray"),
        ("devices.inference={devices: 0-1, tensor_parallel: 2}", "the torch engine runs on one device"),
        ("devices.actor={devices: 0, gpus: 2}", "RoleConfig has no key 'gpus'"),
        ("backend=rai", "backend"),
    ],
)
def test_devices_that_cannot_be(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(TINY, [override])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "devices.actor={devices: 0-1, tensor_parallel: 2}",
            "tensor_parallel 2 needs shards: set actor.strategy=fsdp2",
        ),
        ("devices.actor={devices: 0-1, devices_per_worker: 2}", "0-1: a rank that trains has one device"),
    ],
)
def test_devices_of_ranks_that_cannot_be(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(TINY, ["backend=ray", override])
    assert said in str(caught.value)


REWARDED = {**TINY, "envs": {**TINY["envs"], "domains": {"lake": {"env": "frozenlake", "reward": "exact"}}}}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["backend=embedded"], "devices.reward: 2-3 are processes of their own, and backend 'embedded' has none: set"),
        (["envs.reward_workers=2"], "devices.reward: 2-3 and reward_workers 2 both say where rewards are computed"),
        (["envs.domains.lake.reward=null"], "2-3 have nothing to compute: no domain has a reward"),
        (["devices.reward=auto"], "devices.reward: 'auto' is for actor and inference: name the devices"),
        (["devices.reward={devices: 2-3, devices_per_worker: 2}"], "has one device: leave out devices_per_worker"),
        (
            ["devices.reward={devices: 2-3, tensor_parallel: 2}"],
            "has one device: leave out devices_per_worker and tens",
        ),
    ],
)
def test_devices_of_rewards_that_cannot_be(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(REWARDED, ["backend=ray", "devices={reward: 2-3}", *overrides])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "envs.reward_workers=2",
            "envs.reward_workers 2 are processes of their own, and backend 'embedded' has none",
        ),
        (
            "rollout.extra_after=0.5",
            "rollout.extra_after 0.5 says when extra members begin, and rollout.extra",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(REWARDED, [override])
    assert said in str(caught.value)


def test_rewards_are_a_role_where_they_have_devices_and_only_there() -> None:
    assert build_config(REWARDED, ["backend=ray"]).role_names == ("actor", "inference")
    config = build_config(REWARDED, ["backend=ray", "devices.reward=2-3"])
    assert config.role_names == ("actor", "inference", "reward")
    assert config.device_count == 4
    validated = build_config(
        TINY, ["backend=ray", "devices.reward=1", "validation={domains: {lake: {env: frozenlake, reward: exact}}}"]
    )
    assert validated.role_names == config.role_names


def test_devices_by_number_list_or_in_full_are_the_same_and_read_back() -> None:
    ways = ("devices.actor=1", "devices.actor=[1]", "devices.actor='1'", "devices.actor={devices: [1]}")
    configs = [build_config(TINY, [way]) for way in ways]
    assert all(config == configs[0] for config in configs)
    assert configs[0].device_count == 2
    assert build_config(dump_config(configs[0])).devices == configs[0].devices


def test_a_group_of_one_is_fine_where_nothing_is_compared() -> None:
    assert build_config(TINY, ["preset=reinforce++", "rollout.group_size=1"]).rollout.group_size == 1


def test_the_temperature_of_the_actor_may_be_that_of_the_sampler() -> None:
    assert build_config(TINY, ["actor.temperature=0.5", "envs.sampling.temperature=0.5"]).actor.temperature == 0.5


def test_the_temperature_of_the_reference_may_be_that_of_the_sampler() -> None:
    overrides = ["actor.kl_coef=0.1", "reference.temperature=0.5", "envs.sampling.temperature=0.5"]
    assert build_config(TINY, overrides).reference is not None


@pytest.mark.parametrize("kl", ["actor.kl_coef=0.1", "estimator.kl_coef=0.1"])
def test_an_adapter_with_a_cold_start_has_no_reference(kl: str) -> None:
    model = {"path": "x", "lora": {}}
    text = refusal([kl], model=model)
    assert "the reference is the model under the adapter, without what cold_start taught" in text
    assert len(text.splitlines()) == 1
    for changes in ({"cold_start": None, "model": model}, {"model": {"path": "x"}}):
        assert build_config({**TINY, **changes}, [kl]).needs_reference


def test_an_adapter_drops_in_a_cold_start_alone() -> None:
    model = {"path": "x", "lora": {"dropout": 0.1}}
    assert build_config({**TINY, "model": model}).model.lora is not None
    text = refusal([], model=model, cold_start=None)
    assert "model.lora.dropout 0.1 does nothing without cold_start: remove it" in text


# -- what can be turned on ---------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "training.md"
RECIPES = {
    row[1].strip(): re.findall("`([^`]+)`", row[2])
    for line in DOCS.read_text(encoding="utf-8").split("| variant | keys |")[1].split("\n\n")[0].splitlines()
    if "`" in line and len(row := line.split("|")) == 4
}
"""The rows of a table in the documentation."""


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_documentation_turns_on_can_be_run(tmp_path: Path, name: str) -> None:
    plain, config = build_config(TINY), build_config(TINY, RECIPES[name])
    assert dump_config(config) != dump_config(plain)
    line = steps(trained(tmp_path, "steps=1", *RECIPES[name]).run)[1]
    assert line["train/grad_norm"] > 0
    if "kl_coef" in str(RECIPES[name]):
        assert {"train/reward_kl", "train/kl"} & set(line)


def test_the_documentation_turns_on_what_no_preset_has() -> None:
    keys = " ".join(key for keys in RECIPES.values() for key in keys)
    for key in ("name=rloo", "name=reinforce++-baseline", "dual_clip", "estimator.kl_coef", "actor.correction="):
        assert key in keys


def test_a_cold_start_that_is_not_finite_saves_its_batch(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    done = cadenza("train", path, f"out={tmp_path}", "cold_start.trainer={lr: 1.0e+30, max_grad_norm: null}")
    assert done.code != 0
    assert "the batch is in" in done.err
    assert list((tmp_path / "tiny" / "failures").iterdir())


def test_options_of_a_chat_template_reach_the_tokenizer(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), f"out={tmp_path}", "tokenizer.template_options={think: true}")
    assert done.code == 1
    assert "template_options are for the template 'chat', got {'think': True} for 'plain'" in done.err


# -- files -------------------------------------------------------------------------------------------------------------


def test_words_that_yaml_takes_for_booleans_are_words(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**TINY, "actor": {}}).replace("actor: {}", "actor: {correction: off}"))
    assert read_config(path).actor.correction == "off"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no config file"),
        (b"a: [1, 2", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"- 1\n- 2\n", "must be a mapping of keys to values, got list"),
        (b"", "must be a mapping of keys to values, got NoneType"),
        (b"hello", "must be a mapping of keys to values, got str"),
        (b"steps: 3\nsteps: 4\n", "line 2 has the key 'steps' for the second time"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    done = cadenza("train", path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("cadenza: ")
    assert said in done.err
    assert "run.yaml" in done.err
    assert len(done.err.splitlines()) == 1


def test_a_directory_is_no_config_file(tmp_path: Path) -> None:
    done = cadenza("train", tmp_path)
    assert (done.code, len(done.err.splitlines())) == (1, 1)


# -- dry run -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_config_and_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = config_file(tmp_path)
    done = cadenza("train", path, "preset=ppo", "seed=7", "envs.rollout=trajectory", "--dry-run")
    assert (done.code, done.err) == (0, "")
    again = tmp_path / "again.yaml"
    again.write_text(done.out, encoding="utf-8")
    config = read_config(path, ["preset=ppo", "seed=7", "envs.rollout=trajectory"])
    assert read_config(again) == config.model_copy(update={"preset": None})
    assert (config.critic is not None, config.seed) == (True, 7)
    assert {entry.name for entry in tmp_path.iterdir()} == {"config.yaml", "again.yaml"}


def test_a_dry_run_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    done = cadenza("train", config_file(tmp_path), "stepz=7", "--dry-run")
    assert (done.code, done.out) == (1, "")
    assert "did you mean 'steps'?" in done.err


@pytest.mark.parametrize(
    "key", ["envs.domains.lake.reward", "rollout.group_filter", "sampler.routing", "actor.loss", "trackers"]
)
def test_what_cannot_be_called_is_refused_before_a_run_begins(key: str) -> None:
    config = build_config(TINY, [f"{key}=math:pi"])
    with pytest.raises(ConfigError, match=rf"{key}.*: .*'math:pi' is (of type|a) float; "):
        config.check_names()


@pytest.mark.parametrize("tasks", ["0", "-1", "[]"])
def test_a_domain_without_tasks_is_refused(tasks: str) -> None:
    said = f"envs.domains.lake.tasks must be at least one, got {tasks}: leave it out"
    assert said in refusal([f"envs.domains.lake.tasks={tasks}"])


def test_a_routing_rule_that_cannot_be_loaded_is_found_before_a_run_begins() -> None:
    config = build_config(TINY, ["sampler.routing=nowhere:Rule"])
    with pytest.raises(ConfigError, match=r"sampler\.routing: 'nowhere:Rule' cannot be loaded"):
        config.check_names()
