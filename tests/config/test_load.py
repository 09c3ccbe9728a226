"""Loading a run's YAML: every mistake is one line that names the file, the key and the mend."""

# ruff: noqa: E501 (an expected message stays on one line, as the user sees it)

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rollart.config import ConfigError, load, load_resolved, show
from hpc_rollart.config.checks import default_max_ranks
from hpc_rollart.config.layout import blocks, pool_of, pools, world_size
from hpc_rollart.config.schema import RunConfig

GOOD = textwrap.dedent(
    """\
    run: {name: demo, steps: 20}
    model: {builtin: tiny, max_context: 256}
    algorithm:
      type: grpo
      learning_rate: 1e-4
    tasks:
      - {name: lake, env: frozen-lake}
      - name: sums
        env: reasoning-gym
        args: {task: chain_sum}
        affinity: compute
    engine: {max_requests: 32}
    components:
      trainer: {role: trainer}
      generate-compute: {role: generator, pool: compute, engine: {deterministic: true}}
      generate-bandwidth: {role: generator, pool: bandwidth, ranks_per_node: 2}
      env: {role: env, ranks_per_node: 2}
    """
)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(GOOD)
    return path


def lines(conf: Path, *overrides: str) -> list[str]:
    """Return the problems of `conf` without its directory."""
    with pytest.raises(ConfigError) as caught:
        load(conf, overrides)
    return [line.replace(f"{conf.parent}/", "") for line in caught.value.lines]


def replaced(conf: Path, old: str, new: str) -> Path:
    assert old in GOOD
    conf.write_text(GOOD.replace(old, new))
    return conf


# --- what a good file means --------------------------------------------------------------------------


def test_defaults_that_depend_on_other_keys_are_filled_in(conf: Path) -> None:
    config = load(conf)
    assert config.run.dir == "runs/demo"
    assert config.schedule.alpha == 1
    assert load(conf, ["schedule.mode=sync"]).schedule.alpha == 0
    assert load(conf, ["schedule.mode=one_off"]).schedule.alpha == 1


def test_generator_engine_is_completed_from_the_common_one(conf: Path) -> None:
    part = load(conf).components["generate-compute"]
    assert part.role == "generator"
    assert (part.engine.deterministic, part.engine.max_requests) == (True, 32)


def test_scientific_notation_without_a_dot_is_a_number(conf: Path) -> None:
    assert load(conf).algorithm.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43200), ("1h30m", 5400), ("2d", 172800), ("7", 7)],
)
def test_durations_are_seconds_or_text_with_units(conf: Path, text: str, seconds: float) -> None:
    assert load(conf, [f"run.time_budget={text}"]).run.time_budget == seconds


def test_components_are_blocks_of_ranks_in_file_order(conf: Path) -> None:
    config = load(conf)
    assert [(b.component, b.first, b.count) for b in blocks(config)] == [
        ("trainer", 0, 1),
        ("generate-compute", 1, 1),
        ("generate-bandwidth", 2, 2),
        ("env", 4, 2),
    ]
    assert world_size(config) == 6
    assert pools(config) == ["compute", "bandwidth"]
    assert [pool_of(config, rank) for rank in (1, 2, 3)] == [0, 1, 1]
    with pytest.raises(ValueError, match="rank 0 \\(trainer\\) is no generator"):
        pool_of(config, 0)


def test_shown_config_loads_to_an_equal_one(conf: Path, tmp_path: Path) -> None:
    config = load(conf, ["run.time_budget=12h", "model.warm_start={skill: {lake: 0.3}}"])
    (tmp_path / "config.yaml").write_text(show.dump(config))
    assert load_resolved(tmp_path) == config
    assert load(tmp_path / "config.yaml") == config


def test_reading_a_finished_run_checks_nothing_of_this_machine(conf: Path, tmp_path: Path) -> None:
    moved = GOOD.replace("builtin: tiny", "path: /gone").replace("env: frozen-lake", "env: my_envs:Gone")
    (tmp_path / "config.yaml").write_text(moved)
    assert load_resolved(tmp_path).model.path == "/gone"


# --- overrides ---------------------------------------------------------------------------------------


def test_override_names_a_task_by_index_or_name(conf: Path) -> None:
    config = load(conf, ["tasks.0.weight=2", "tasks.sums.weight=3"])
    assert [task.weight for task in config.tasks] == [2, 3]


def test_override_reaches_sections_the_file_leaves_out(conf: Path) -> None:
    assert load(conf, ["checkpoint.every_steps=5"]).checkpoint.every_steps == 5
    assert load(conf, ["algorithm.clip.high=0.3"]).algorithm.clip.high == 0.3


def test_an_override_within_what_is_wrong_is_named_beside_the_line(conf: Path) -> None:
    (line,) = lines(conf, "tasks.lake.args={}", "tasks.lake.args.sizee=3")
    assert line.endswith("args.sizee: unknown key; did you mean 'size'? (with -o tasks.lake.args.sizee=3)")


def test_later_override_wins(conf: Path) -> None:
    assert load(conf, ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.stepz=3", "run.stepz: unknown key; did you mean run.steps?"),
        ("steps=3", "steps: unknown key; did you mean run.steps?"),
        ("nonsense=3", "nonsense: unknown key; keys here: run, model, algorithm, schedule, tasks, engine, "
                       "components, weights, store, checkpoint, launch, cluster"),
        ("tasks.gone.weight=2", "tasks has no entry 'gone'; entries: lake, sums (or 0 to 1)"),
        ("tasks.2.weight=2", "tasks has no entry '2'; entries: lake, sums (or 0 to 1)"),
        ("components.trainr.nodes=2", "no component is named 'trainr'; components: trainer, generate-compute, "
                                      "generate-bandwidth, env"),
        ("components.trainer.slots=2", "components.trainer.slots: only a component of role env has this key, "
                                       "not trainer"),
        ("run.steps.more=3", "run.steps is a single value and has no key 'more'"),
        ("run.steps", "expected KEY=VALUE, for example run.steps=100"),
        ("run.steps=[", "the value is not valid YAML: expected the node content, but found '<stream end>'"),
    ],
)  # fmt: skip
def test_override_of_an_unknown_path_is_an_error_that_names_the_override(
    conf: Path, override: str, line: str
) -> None:
    assert lines(conf, override) == [f"-o {override}: {line}"]


# --- what is wrong on its own ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("run.steps=many", 'run.steps: expected a whole number, not "many"'),
        ("run.steps=2.5", "run.steps: expected a whole number, not 2.5"),
        ("run.steps=true", "run.steps: expected a whole number, not true"),
        ("run.steps=0", "run.steps: must be at least 1, not 0"),
        ("run.steps=null", "run.steps: is empty; expected a whole number"),
        ("run.name=7", "run.name: expected text, not 7"),
        ("run.name=a/b", 'run.name: "a/b" is no name: use letters, digits, - and _, at most 64, and no - or _ first'),
        ("run.time_budget=soon", "run.time_budget: expected a duration such as 90s, 30m, 12h or 1h30m, "
                                 'not "soon"'),
        ("algorithm.learning_rate=.nan", "algorithm.learning_rate: expected a finite number, not NaN"),
        ("algorithm.betas=[0.9]", None),
        ("schedule=null", "schedule: is empty; expected a mapping, or remove the line to get the default"),
        ("schedule.mode=asinc", 'schedule.mode: must be one of async, one_off, sync, not "asinc"; did you mean async?'),
        ("algorithm.type=grop", 'algorithm.type: must be one of grpo, not "grop"; did you mean grpo?'),
        ("tasks=[]", "tasks: needs 1 or more entries"),
    ],
)  # fmt: skip
def test_wrong_value_is_named_with_what_was_expected(conf: Path, override: str, text: str | None) -> None:
    found = lines(conf, override)
    assert len(found) == 1
    if text is not None:
        assert found == [f"-o {override}: {text}"]


def test_line_of_the_file_is_named(conf: Path) -> None:
    assert lines(replaced(conf, "  learning_rate", "  lerning_rate")) == [
        "conf.yaml:5: algorithm.lerning_rate: unknown key; did you mean algorithm.learning_rate?"
    ]


def test_key_of_a_task_is_named_by_the_task(conf: Path) -> None:
    assert lines(replaced(conf, "affinity: compute", "afinity: compute")) == [
        "conf.yaml:11: tasks.sums.afinity: unknown key; did you mean tasks.sums.affinity?"
    ]


def test_all_problems_are_told_at_once(conf: Path) -> None:
    conf.write_text(GOOD.replace("steps: 20", "stepz: 20").replace("type: grpo", "type: ppo"))
    assert lines(conf) == [
        "conf.yaml:1: run.steps: required key is missing (Training steps; each consumes one batch and publishes "
        "one weight version)",
        "conf.yaml:1: run.stepz: unknown key; did you mean run.steps?",
        'conf.yaml:4: algorithm.type: must be one of grpo, not "ppo"',
    ]


def test_role_of_a_component_is_needed_and_known(conf: Path) -> None:
    assert lines(replaced(conf, "env: {role: env, ", "env: {")) == [
        "conf.yaml:17: components.env: needs a role: one of trainer, generator, env"
    ]
    assert lines(replaced(conf, "role: env", "role: envs")) == [
        'conf.yaml:17: components.env: role must be one of trainer, generator, env, not "envs"; did you mean env?'
    ]


def test_missing_file_and_directory_are_told_apart(conf: Path, tmp_path: Path) -> None:
    conf.unlink()
    assert lines(conf) == ["conf.yaml: there is no such file"]
    conf.mkdir()
    assert lines(conf) == ["conf.yaml: cannot be read: Is a directory"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {name: demo\nmodel: 3\n", "conf.yaml:2: not valid YAML: "),
        ("run: {name: a}\nrun: {name: b}\n", "conf.yaml:2: not valid YAML: key 'run' stands twice"),
        ("1: 2\n", "conf.yaml:1: not valid YAML: key 1 is not text"),
        ("- a\n", "conf.yaml: expected keys such as run, model and tasks at the top"),
        ("", "conf.yaml: expected keys such as run, model and tasks at the top"),
        ("a: !!python/object/apply:os.system [id]\n", "conf.yaml:1: not valid YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_file_that_is_no_such_yaml_is_told_with_its_line(conf: Path, text: str, line: str) -> None:
    conf.write_text(text)
    assert len(lines(conf)) == 1
    assert lines(conf)[0].startswith(line)


def test_component_that_stands_twice_is_an_error(conf: Path) -> None:
    conf.write_text(GOOD + "  env: {role: env, ranks_per_node: 3}\n")
    assert lines(conf) == ["conf.yaml:18: not valid YAML: key 'env' stands twice"]


# --- what is wrong between keys, and on this machine -------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["tasks.sums.affinity=gpu"], "tasks.sums.affinity: no component has pool 'gpu'; pools: compute, bandwidth"),
        (["tasks.sums.name=lake"], "tasks.lake.name: another task is named 'lake' too; rename one"),
        (["tasks.lake.sampling.max_tokens=256"], "tasks.lake.sampling.max_tokens: 256 leaves no room for a prompt; "
                                                 "use less than model.max_context, 256"),
        (["algorithm.group_size=1"], "algorithm.group_size: with 1 every advantage is zero"),
        (["algorithm.minibatches=9"], "algorithm.minibatches: 9 minibatches cannot share 8 groups"),
        (["algorithm.warmup_steps=20"], "algorithm.warmup_steps: the learning rate would still rise"),
        (["schedule={mode: sync, alpha: 1}"], "schedule.alpha: mode sync trains on fresh trajectories only"),
        (["schedule={mode: one_off, alpha: 2}"], "schedule.alpha: mode one_off works exactly one batch ahead"),
        (["schedule.retry={backoff_s: 90}"], "schedule.retry.backoff_max_s: 60 is less than backoff_s (90)"),
        (["model.path=/tmp"], "model: give exactly one of path and builtin; both are given"),
        (["model.builtin=null"], "model: give exactly one of path and builtin; neither is given"),
        (["model.builtin=null", "model.path=/no/such"], "model.path: there is no directory /no/such"),
        (["model.builtin=null", "model.path=/proc"], "model.path: /proc holds no config.json"),
        (["model.builtin=smollm2-135m-instruct", "model.warm_start={}"], "model.warm_start: only the built-in tiny"),
        (["model.warm_start={skill: {lak: 0.5}}"], "model.warm_start.skill.lak: no task is named 'lak'; tasks: lake"),
        (["components.env.ranks_per_node=1"], "components.env.ranks_per_node: its first rank coordinates the run"),
        (["components.trainer.nodes=2"], "components.trainer: 2 trainer ranks; this version trains on exactly one"),
        (["components.trainer={role: env}"], "components: no component has role trainer"),
        (["components={trainer: {role: trainer}, env: {role: env, nodes: 2}}", "tasks.sums.affinity=null"],
         "components: no component has role generator"),
        (["components={trainer: {role: trainer}, g: {role: generator, pool: compute}}"],
         "components: no component has role env"),
        (["launch.max_ranks=5"], "launch.max_ranks: the run has 6 ranks (trainer 1, generate-compute 1, "
                                 "generate-bandwidth 2, env 2) and only 5 may start here"),
        ([f"components.env.ranks_per_node={default_max_ranks()}"], "launch.max_ranks: the run has"),
        (["tasks.lake.env=frozen-lak"], "tasks.lake: env 'frozen-lak': no such environment; did you mean"),
        (["tasks.lake.args={sise: 4}"], "tasks.lake: env 'frozen-lake': args.sise: unknown key; did you mean 'size'?"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_told_with_the_mend(
    conf: Path, overrides: list[str], text: str
) -> None:
    assert any(text in line for line in lines(conf, *overrides)), lines(conf, *overrides)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(
        [*RunConfig.model_fields, "role", "name", "engine", "slots"]), below, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_data_is_accepted_or_refused_in_plain_words(
    tmp_path_factory: pytest.TempPathFactory, data: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(show.yaml.safe_dump(data))
    try:
        load(path)
    except ConfigError as error:
        assert error.lines
        assert all("\n" not in line and line.startswith(str(path)) for line in error.lines)


# --- values that are no values -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("9" * 400, "expected a duration of at most 10 years (3650d), not 999"),
        ("9" * 400 + "h", "expected a duration of at most 10 years (3650d), not "),
        ("1e400", "expected a duration of at most 10 years (3650d), not Infinity"),
        (".inf", "expected a duration of at most 10 years (3650d), not Infinity"),
        ("3651d", "expected a duration of at most 10 years (3650d), not "),
        (".nan", "expected a finite number, not NaN"),
        ("nan", "expected a duration such as "),
        ("-1", "must be more than 0, not -1"),
        ("9" * 5000, "the value is not valid YAML: a number or date in it is out of range"),
        ("2026-13-45", "the value is not valid YAML: a number or date in it is out of range"),
        ("[" * 5000, "the value is nested too deeply"),
        ("&a [*a]", "expected a number, not this list"),
        ("a" * 100_000, "expected a duration such as "),
        (r'"\ud800"', r"run.time_budget: has \ud800 in it, which is no text; remove it"),
        (r'"\0"', r"run.time_budget: has \x00 in it, which is no text; remove it"),
        ('"\udcff"', "the value is not valid YAML: unacceptable character #xdcff"),
    ],
    ids=range(16),
)
def test_senseless_duration_is_one_short_line(conf: Path, value: str, said: str) -> None:
    (line,) = lines(conf, f"run.time_budget={value}")
    assert said in line
    assert len(line) < 300 and line.isprintable()


def test_longest_duration_is_ten_years(conf: Path) -> None:
    assert load(conf, ["run.time_budget=3650d"]).run.time_budget == 3650 * 86400


@pytest.mark.parametrize("text", ["steps: 2026-13-45", "steps: " + "9" * 5000])
def test_number_that_python_refuses_is_the_files_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(f"run: {{{text}}}\n")
    assert lines(path) == ["odd.yaml: not valid YAML: a number or date in it is out of range"]


@pytest.mark.parametrize("key", ["k\udcff", "run.k\udcff", "components.k\udcff.nodes", "tasks.k\udcff.name"])
def test_key_that_is_no_text_is_shown_by_its_number(conf: Path, key: str) -> None:
    (line,) = lines(conf, f"{key}=1")
    assert line.startswith(f"-o {key}=1: ".replace("\udcff", r"\udcff")) and line.isprintable()


@pytest.mark.parametrize(
    "override",
    ["LONG=1", "run.LONG=1", "LONG.x=1", "components.LONG.nodes=1", "tasks.LONG.weight=1", "model.dtype=LONG",
     "run.name=LONG", "run.steps=LONG", "components.env.gpu=LONG", "components.env.role=LONG", "tasks.0.env=LONG",
     "model={path: LONG}", "model={path: ~LONG/x}"],
)  # fmt: skip
def test_value_of_a_screen_is_cut_where_it_is_quoted(conf: Path, override: str) -> None:
    for line in lines(conf, override.replace("LONG", "x" * 100_000)):
        assert len(line) < 600, line[:600]
