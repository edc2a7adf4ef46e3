# ruff: noqa: RUF001 - letters of other scripts look like Latin ones
"""Which language a text is in, good enough to check an instruction: by its script, then by its most common words.

Only languages of this table are told apart. A short text, or one in a language that is not here, may be taken for a
neighbour of its own script; `docs/rewards.md` says how sure it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

SCRIPTS = {
    "CYRILLIC": ("ru", "uk", "bg"),
    "GREEK": ("el",),
    "HEBREW": ("he",),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr"),
    "BENGALI": ("bn",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "KANNADA": ("kn",),
    "THAI": ("th",),
    "HANGUL": ("ko",),
    "CJK": ("zh",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "LATIN": ("en", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "fi", "tr", "vi", "sw"),
}
"""The languages of each script; where there are several, their words decide."""

WORDS = {
    "en": "the of and to in is that it was for on are with as be this have from or by not but what you they which",
    "de": "der die und das ist nicht ein eine ich zu den mit sich auf für von dem des auch es werden als wie bei sind",
    "fr": "le la les et des est un une que dans pour pas qui sur avec plus par ce au sont nous vous il elle mais ou",
    "es": "el la los las y que es en un una por con para no se del lo como más pero sus al son este está muy también",
    "it": "il lo la gli le e che è di un una per con non si del della sono come più ma anche nel questo alla dei",
    "pt": "o os as e que é em um uma por com para não se do da no na mais mas como são dos das pelo também ao muito",
    "nl": "de het een en van is dat niet in op te zijn voor met die er aan ook als maar om bij wordt door naar deze",
    "sv": "och att det som en ett är på för med av inte den till har de i om var sig från men vi kan eller när",
    "pl": "i w na z nie się jest to że do jak po co ale za od tak przez tym dla są oraz może który czy być",
    "fi": "ja on ei se että oli hän mutta ovat kun niin myös joka tai jos mitä sen voi kuin olla tämä ole nyt vain",
    "tr": "ve bir bu da de için ile çok ne olarak daha gibi var ama olan kadar sonra en değil ya mi her o veya",
    "vi": "và của là có không được một trong cho các người những với này đã để khi từ đến như về tôi ở ra",
    "sw": "na ya wa kwa ni la katika za kuwa hii cha au si kama hiyo watu pia sana yake hilo huo kila lakini",
    "ru": "и в не на что я с он как это по но они мы к из у за вы так от же для было бы только есть или",
    "uk": "і в не на що я з він як це по але вони ми до із у за ви так від для було щоб та є або також ще",
    "bg": "и в не на че аз с той като това по но те ние до от за вие така е са да се ще или има може също",
    "ar": "في من على إلى أن هذا التي عن مع هو كان هذه الذي ما لا هي بين كل قد بعد أو ذلك و",
    "fa": "و در به از که این را با است برای آن یک خود تا کرد بر هم نیز شد می باید یا ما هر",
    "ur": "کے میں کی ہے اور سے کا کو پر نے یہ کہ اس ہیں ایک وہ بھی تھا جو لیے نہیں کر گیا یا",
    "hi": "के में की है और से का को पर ने यह कि इस हैं एक वह भी था जो लिए नहीं कर गया या",
    "mr": "आणि आहे या की ते हे तो ती मध्ये व होते नाही एक असे साठी किंवा आहेत त्या पण तर हा काही मी",
}
"""The most common words of the languages that share a script."""


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language that most of the text is in; None for a text without letters, or whose words
    are in none of the lists of its script."""
    scripts = Counter(script for letter in text if (script := _script(letter)) is not None)
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > scripts.total() / 10:
        return "ja"  # its nouns are written in Chinese characters
    languages = SCRIPTS.get(scripts.most_common(1)[0][0], ())
    if len(languages) < 2:
        return languages[0] if languages else None
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u0963]+[^\W\d_]*)*", text.casefold()))
    hits = {language: sum(words[word] for word in WORDS[language].split()) for language in languages}
    best = max(hits, key=lambda language: hits[language])
    return best if hits[best] else None


def _script(letter: str) -> str | None:
    return unicodedata.name(letter, "?").split()[0].split("-")[0] if letter.isalpha() else None
