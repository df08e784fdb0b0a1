"""The strategy line: what it reads, what it refuses, what it fills in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb.plan import FIELDS, Strategy
from colossal_nb.plan.legal import BUILT


def values(name):
    field = FIELDS[name]
    return st.sampled_from(field.choices) if field.choices else st.integers(1, 10**6)


lines = st.fixed_dictionaries({}, optional={name: values(name) for name in FIELDS})
small = st.fixed_dictionaries({}, optional={name: st.integers(1, 4) for name in ("dp", "pp", "sp", "tp")})


def refused(call):
    with pytest.raises(ValueError, match=r"\S") as caught:
        call()
    return str(caught.value)


@given(lines)
def test_text_and_value_round_trip(fields):
    strategy = Strategy(**fields)
    assert Strategy.parse(str(strategy)) == strategy


@given(
    lines,
    st.sampled_from([" ", "\u00a0", ", ", "\t", "\u2003", ",", "; ", "  \u200b "]),
    st.sampled_from(["=", " = ", "\u00a0="]),
)
def test_any_space_reads_the_same(fields, between, equals):
    text = between.join(f"{name}{equals}{value}" for name, value in fields.items())
    assert Strategy.parse(f"{between}{text} # tp=7, a comment") == Strategy(**fields)


def test_empty_text_is_the_default():
    assert Strategy.parse("") == Strategy() == Strategy.parse("   # nothing")
    assert str(Strategy()) == ""


@pytest.mark.parametrize("text", ["dp=2 tp=2 pp=2 microbatches=4 schedule=gpipe", "tp=2 pp=2 sp=2", "tp=4 tp_mode=2d"])
def test_it_is_printed_in_the_order_in_which_people_write_it(text):
    words = text.split()
    assert str(Strategy.parse(" ".join(reversed(words)))) == text
    assert Strategy.parse("pp=2 tp=2").describe(8) == "dp=2 (filled) tp=2 pp=2"


def test_capitals_are_forgiven():
    assert Strategy.parse("TP=2 Schedule=GPipe TP_Mode=1D") == Strategy(tp=2, schedule="gpipe")


def test_default_said_aloud_is_the_default():
    assert Strategy.parse("pp=1 zero=0 precision=fp32") == Strategy()


@pytest.mark.parametrize("text, meant", [
    ("cp=2", "sp=2"),
    ("fsdp", "zero=3"),
    ("zero2", "zero=2"),
    ("bf16", "precision=bf16"),
    ("microbatch=4", "microbatches=4"),
    ("micro_batches=4", "microbatches=4"),
    ("pipeline=2", "pp=2"),
    ("mp=2", "tp=2"),
    ("2d", "tp_mode=2d"),
    ("shedule=gpipe", "schedule=gpipe"),
    ("precison=bf16", "precision=bf16"),
    ("recomput=full", "recompute=full"),
])  # fmt: skip
def test_near_miss_is_hinted(text, meant):
    assert f"did you mean {meant}?" in refused(lambda: Strategy.parse(text))


def test_hint_is_a_line_that_parses():
    for text in ("fsdp", "bf16", "2d", "ulysses", "checkpoint"):
        Strategy.parse(refused(lambda text=text: Strategy.parse(text)).split("did you mean ")[1].rstrip("?"))


def test_unknown_field_lists_the_fields():
    message = refused(lambda: Strategy.parse("quux=2"))
    assert all(name in message for name in FIELDS)


@pytest.mark.parametrize(
    "text", ["tp", "tp=", "tp=two", "tp=0", "tp=-1", "tp=1.5", "zero=4", "schedule=fast", "tp=2 tp=2"]
)
def test_bad_value_is_refused_by_name(text):
    assert text.partition("=")[0] in refused(lambda: Strategy.parse(text))


@pytest.mark.parametrize("text, meant", [
    ("precision=bf61", "precision=bf16"), ("precision=bf-16", "precision=bf16"), ("schedule=1f1", "schedule=1f1b"),
    ("precision=bfloat16", "precision=bf16"), ("recompute=ful", "recompute=full"), ("sp_mode=rings", "sp_mode=ring"),
])  # fmt: skip
def test_near_value_is_hinted(text, meant):
    assert refused(lambda: Strategy.parse(text)).startswith(f"{text}: did you mean {meant}? ")


@pytest.mark.parametrize("text, values", [
    ("precision=fp8", "fp32, bf16, fp16"), ("precision=fp64", "fp32, bf16, fp16"),
    ("precision=float16", "fp32, bf16, fp16"), ("recompute=yes", "none, selective, full"),
    ("sp_mode=x", "ring, ulysses"), ("schedule=2f2b", "1f1b, gpipe (not built yet: interleaved, zb-h1, zbv)"),
    ("offload=disk", "none"),
    ("tp_mode=4d", "1d (not built yet: 1d-sp, 2d, 2.5d, 3d)"), ("zero=4", "0 (not built yet: 1, 2, 3)"),
])  # fmt: skip
def test_another_value_is_answered_with_all_that_there_are(text, values):
    said = refused(lambda: Strategy.parse(text))
    assert said.startswith(f"{text}: {text.partition('=')[0]} is one of {values}") and "did you mean" not in said


def test_everything_wrong_is_said_at_once():
    message = refused(lambda: Strategy.parse("cp=2 tp=0 zero=9 dp=2 dp=3"))
    assert message.count("\n  - ") == 4
    for part in ("'cp'", "tp=0", "zero=9", "dp is given twice"):
        assert part in message


def test_value_object_is_guarded_like_the_text():
    assert "tp=0" in refused(lambda: Strategy(tp=0))
    assert "zero=True" in refused(lambda: Strategy(zero=True))
    assert "precision=8" in refused(lambda: Strategy(precision=8))


@given(small, st.integers(1, 64))
def test_what_works_is_a_multiple_that_fits(fields, engines):
    strategy = Strategy(**fields)
    used = strategy.uses(engines)
    each = strategy.pp * strategy.sp * strategy.tp
    if strategy.needs > engines:
        assert used == 0
        assert "needs" in refused(lambda: strategy.filled(engines))
    else:
        assert used <= engines and used % each == 0
        assert strategy.mesh(engines).size == used
        assert used + each > engines or strategy.dp is not None


def test_dp_fills_the_engines():
    strategy = Strategy.parse("tp=2")
    assert strategy.filled(8).dp == 4
    assert strategy.uses(7) == 6
    assert strategy.needs == 2
    assert strategy.describe(7) == "dp=3 (filled) tp=2"
    assert Strategy.parse("dp=2 tp=2").describe(8) == "dp=2 tp=2"
    assert Strategy().describe(1) == "one engine"


def test_microbatches_and_chunks_depend_on_the_rest():
    assert Strategy().filled(1).microbatches == 1
    assert Strategy(pp=4).filled(4).microbatches == 4
    assert Strategy(pp=4, microbatches=8).filled(4).microbatches == 8
    assert Strategy(pp=4).filled(4).chunks == 1
    assert Strategy(pp=4, schedule="zbv").filled(4).chunks == 2


def test_too_many_engines_says_what_would_fit():
    assert refused(lambda: Strategy(pp=2, tp=4).check(4)) == (
        "tp=4 pp=2 needs 8 engines, there are 4; nearest that fits: tp=4"
    )
    assert "nearest that fits: tp=2 pp=2" in refused(lambda: Strategy(pp=3, tp=3).check(4))


@given(small, st.integers(1, 16))
def test_what_is_said_to_fit_fits(fields, engines):
    strategy = Strategy(**{name: size for name, size in fields.items() if name != "sp"})
    if strategy.needs > engines:
        Strategy.parse(refused(lambda: strategy.check(engines)).split("nearest that fits: ")[1]).check(engines)


@pytest.mark.parametrize("text", ["dp=1000", "tp=100000000", "dp=64 tp=64 pp=64 microbatches=9"])
def test_absurd_size_is_refused_without_knowing_the_engines(text):
    message = refused(lambda: Strategy.parse(text).check())
    assert "more than the 64 that can be started here; nearest that fits: " in message


def test_bound_can_be_set():
    Strategy(tp=2).check(most=2)
    assert "more than the 1 that" in refused(lambda: Strategy(tp=2).check(most=1))


@pytest.mark.parametrize("text, sentence", [
    ("tp=8 tp_mode=2d", "2d needs tp = q*q; 8 is none: tp=4, or tp=9, or tp=8 tp_mode=2.5d depth=2"),
    ("tp=8 tp_mode=2.5d depth=3", "tp=8 with depth=3 is none: tp=3, or tp=12, or tp=8 depth=2"),
    ("tp=9 tp_mode=3d", "3d needs tp = q*q*q; 9 is none: tp=8, or tp=27"),
    ("tp=2 depth=2", "depth=2 belongs to tp_mode=2.5d"),
    ("pp=2 schedule=zbv chunks=3", "zbv has exactly 2 chunks"),
    ("pp=2 chunks=2", "1f1b has one chunk per rank, not 2"),
    ("pp=2 schedule=interleaved chunks=1", "interleaved has at least 2 chunks"),
    ("schedule=zbv", "schedule=zbv needs a pipeline"),
])  # fmt: skip
def test_illegal_shape_is_refused_with_the_nearest_legal(text, sentence):
    assert sentence in refused(lambda: Strategy.parse(text).check())


@pytest.mark.parametrize(
    "text", ["tp=4 tp_mode=2d", "tp=8 tp_mode=2.5d depth=2", "tp=8 tp_mode=3d", "pp=2 schedule=zbv"]
)
def test_legal_grid_is_only_refused_as_not_built(text):
    assert refused(lambda: Strategy.parse(text).check()).endswith(
        ("built: tp_mode=1d", "built: schedule=1f1b, schedule=gpipe")
    )


@pytest.mark.parametrize("name", BUILT)
def test_what_is_not_built_is_refused_by_name_with_what_is(name):
    other = next(v for v in FIELDS[name].choices or (2,) if v not in BUILT[name])
    message = refused(lambda: Strategy(**{name: other}).check())
    assert f"{name}={other} is not built yet; built: {name}={BUILT[name][0]}" in message


def test_all_reasons_against_a_strategy_come_at_once():
    message = refused(lambda: Strategy.parse("tp=8 tp_mode=2d zero=3 depth=2").check(4))
    for part in ("2d needs", "zero=3 is not built", "tp_mode=2d is not built", "depth=2 belongs", "needs 8 engines"):
        assert part in message


def test_what_is_built_passes():
    for text in ("", "dp=4", "tp=4", "pp=4", "dp=2 tp=2", "dp=2 tp=2 pp=2 schedule=gpipe microbatches=16"):
        Strategy.parse(text).check(8)


def test_every_field_explains_itself():
    for name, field in FIELDS.items():
        assert field.doc and field.name == name and field.values
