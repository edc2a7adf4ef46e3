# ruff: noqa: RUF001 - letters of other scripts look like Latin ones
from __future__ import annotations

import json
from typing import Any

import pytest

from cadenza.errors import RewardError
from cadenza.rewards import Sample, Scored, make_reward
from cadenza.rewards.constraints import CONSTRAINTS
from cadenza.rewards.language import language_of
from cadenza.simulation.virtual_cluster.clock import run

KEPT: list[tuple[str, dict[str, Any], str, str]] = [
    ("words", {"exactly": 3}, "It's well-known here", "one two"),
    ("words", {"at_least": 2, "at_most": 3}, "one two three", "one two three four"),
    ("sentences", {"exactly": 2}, "Pi is 3.14. It goes on!", "One. Two. Three."),
    ("sentences", {"at_most": 1}, "No full stop", "Is it? Yes."),
    ("paragraphs", {"exactly": 2}, "one\nstill one\n\ntwo", "one\ntwo"),
    ("paragraphs", {"exactly": 2}, "one\n***\ntwo", "one"),
    ("characters", {"at_most": 5}, "12345 ", "123456"),
    ("lines", {"exactly": 2}, "a\n\nb", "a"),
    ("bullets", {"exactly": 2}, "- a\n* b", "- a\n- b\n- c"),
    ("bullets", {"at_least": 2}, "1. a\n2) b", "1.5 is a number\n-2 too"),
    ("placeholders", {"at_least": 2}, "Dear [name], at [place]", "Dear [name]"),
    ("highlights", {"at_least": 2}, "*one* and **two**", "2 * 3 * 4"),
    ("headings", {"exactly": 1}, "# Title\ntext", "#hashtag"),
    ("capital_words", {"at_least": 2}, "THIS is NOT right", "Only ONE"),
    ("include", {"keywords": ["cat", "big dog"]}, "A Cat and a big\ndog.", "A category and a big dog"),
    ("exclude", {"keywords": ["cat"]}, "category", "The cat"),
    ("frequency", {"keyword": "ha", "exactly": 2}, "ha, ha", "haha ha"),
    ("letter_frequency", {"letter": "e", "at_most": 1}, "Eat", "Eel"),
    ("case", {"case": "upper"}, "ALL OF IT, 3!", "All of it"),
    ("case", {"case": "lower"}, "all of it", "123"),
    ("starts_with", {"phrase": "Sure"}, " sure, why not", "Not sure"),
    ("ends_with", {"phrase": "Any questions?"}, '... "Any questions?"', "Any questions? No."),
    ("paragraph_starts", {"number": 2, "word": "But"}, "One.\n\nBut two.", "But one.\n\nTwo."),
    ("postscript", {}, "Text.\nP.S. more", "Text with P.S. inside"),
    ("title", {}, "<<My title>>\ntext", "<< >> text"),
    ("quoted", {}, '"all of it"', '"part" of it'),
    ("json", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("one_of", {"options": ["Yes", "No"]}, "yes.", "Yes and no"),
    ("language", {"language": "de"}, "Das ist nicht der Weg, den ich mit dir gehe.", "This is not the way."),
    ("repeats_prompt", {"prompt": "What is it?"}, "What is it? A cat.", "A cat."),
    ("two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("no_commas", {}, "no comma here", "one, two"),
    ("no_digits", {}, "none", "2 of them"),
    ("ascii", {}, "plain", "naïve"),
]


@pytest.mark.parametrize(("kind", "arguments", "kept", "broken"), KEPT, ids=[f"{k[0]}-{n}" for n, k in enumerate(KEPT)])
def test_a_constraint_tells_a_text_that_keeps_to_it_from_one_that_does_not(
    kind: str, arguments: dict[str, Any], kept: str, broken: str
) -> None:
    assert CONSTRAINTS[kind](kept, **arguments) is True
    assert CONSTRAINTS[kind](broken, **arguments) is False


def test_every_constraint_has_a_case_above() -> None:
    if kind := CONSTRAINTS.keys() - {case[0] for case in KEPT}:
        pytest.fail(f"no case for {kind}")


TEXTS = {
    "en": "The quick brown fox jumps over the lazy dog, and it was not what you expected from this animal.",
    "de": "Der schnelle Fuchs springt über den faulen Hund, und das ist nicht das, was man von ihm erwartet.",
    "fr": "Le renard saute par-dessus le chien, et ce n'est pas ce que l'on attend de lui dans cette histoire.",
    "es": "El zorro salta sobre el perro, y no es lo que se espera de él en esta historia, pero es muy rápido.",
    "it": "La volpe salta sopra il cane, e non è quello che ci si aspetta da lei, ma è anche molto veloce.",
    "pt": "A raposa salta sobre o cão, e não é o que se espera dela nesta história, mas também é muito rápida.",
    "nl": "De vos springt over de hond, en dat is niet wat je van het dier verwacht, maar het is ook snel.",
    "sv": "Räven hoppar över hunden, och det är inte vad man väntar sig av den, men den är också snabb.",
    "pl": "Lis skacze przez psa, i to nie jest to, czego się po nim spodziewamy, ale jest bardzo szybki.",
    "fi": "Kettu hyppää koiran yli, ja se ei ole sitä mitä odotetaan, mutta se on myös hyvin nopea kun voi olla.",
    "tr": "Tilki köpeğin üzerinden atlar ve bu ondan beklenen bir şey değil, ama çok hızlı olan bir hayvan.",
    "vi": "Con cáo nhảy qua con chó và đó không phải là điều được mong đợi, nhưng nó là một con vật có tốc độ.",
    "sw": "Mbweha anaruka juu ya mbwa na hii si kitu cha kawaida kwa watu, lakini ni mnyama wa kasi sana.",
    "ru": "Лиса прыгает через собаку, и это не то, что мы от неё ждём, но она очень быстрая.",
    "uk": "Лисиця стрибає через собаку, і це не те, що ми від неї чекаємо, але вона також дуже швидка.",
    "bg": "Лисицата скача през кучето и това не е нещо, което да се очаква, но тя също може да е бърза.",
    "el": "Η αλεπού πηδάει πάνω από τον σκύλο.",
    "he": "השועל קופץ מעל הכלב.",
    "ar": "يقفز الثعلب فوق الكلب، وهذا ليس ما كان في القصة من قبل، لكن هو سريع على الأرض مع كل هذا.",
    "fa": "روباه از روی سگ می پرد و این چیزی نیست که از آن انتظار است، اما برای یک حیوان سریع است.",
    "ur": "لومڑی کتے کے اوپر سے چھلانگ لگاتی ہے اور یہ وہ نہیں ہے جو اس سے توقع کی جاتی ہے۔",
    "hi": "लोमड़ी कुत्ते के ऊपर से कूदती है और यह वह नहीं है जो उस से उम्मीद की जाती है।",
    "mr": "कोल्हा कुत्र्यावरून उडी मारतो आणि हे असे नाही की ते आहे, पण तो एक वेगवान प्राणी आहे.",
    "bn": "শিয়াল কুকুরের উপর দিয়ে লাফ দেয়।",
    "ta": "நரி நாயின் மேல் தாவுகிறது.",
    "th": "สุนัขจิ้งจอกกระโดดข้ามสุนัข",
    "ko": "여우가 개를 뛰어넘는다.",
    "zh": "狐狸跳过了狗。",
    "ja": "キツネは犬を飛び越える。",
}


@pytest.mark.parametrize("language", TEXTS)
def test_the_language_of_a_sentence_is_told(language: str) -> None:
    assert language_of(TEXTS[language]) == language


def test_a_text_without_letters_or_without_known_words_has_no_language() -> None:
    assert language_of("1 + 2 = 3") is None
    assert language_of("xyzzy plugh") is None


# -- the reward --------------------------------------------------------------------------------------------------------

INSTRUCTIONS = [{"kind": "words", "at_most": 5, "at_least": None}, {"kind": "no_commas"}, {"kind": "json"}]


def scored(spec: Any, response: str, instructions: Any) -> Scored:
    async def main() -> Scored:
        sample = Sample(response=response, row={"instructions": instructions}, domain="rules")
        return await make_reward({"rules": spec}, "rules")(sample)

    return run(main)


@pytest.mark.parametrize("instructions", [INSTRUCTIONS, json.dumps(INSTRUCTIONS)])
def test_the_value_is_the_share_of_the_constraints_that_are_kept(instructions: Any) -> None:
    result = scored("instructions", "one two three", instructions)
    assert result.value == pytest.approx(2 / 3)
    assert (result.success, result.note) == (False, "rules: not kept: json")
    assert result.parts == {"rules": result.value, "rules/words": 1.0, "rules/no_commas": 1.0, "rules/json": 0.0}
    assert scored({"name": "instructions", "score": "all"}, "one two three", instructions).value == 0.0
    assert scored({"name": "instructions", "score": "all"}, "123", instructions).value == 1.0


def test_an_empty_response_keeps_to_nothing() -> None:
    assert scored("instructions", " \n", [{"kind": "no_commas"}]).value == 0.0


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([{"kind": "wrods", "at_most": 3}], "domain 'rules': kind 'wrods' is no constraint; did you mean 'words'"),
        ([{"kind": "words"}], "words with {}: it needs at_least, at_most or exactly"),
        ([{"kind": "words", "max": 3}], "unexpected keyword argument 'max'"),
        ([{"kind": "language", "language": "klingon"}], "language must be one of"),
        ([{"kind": "case", "case": "camel"}], "case must be 'upper' or 'lower'"),
        ([], "must be a list of constraints"),
        ("not json", "must be a list of constraints"),
    ],
)
def test_a_row_with_a_constraint_that_means_nothing_is_an_error_that_shows_it(instructions: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        scored("instructions", "text", instructions)
