"""A made-up language: lemmas, features and inflected forms by rules that resemble Turkish.

The language is written as tables, which the reader of real tables reads. The bytes depend on the settings only.

A form is the lemma with up to three suffixes (plural, possessor, case). The vowels of a suffix agree with the last
vowel before it (front or back), a hard last consonant softens before a vowel, and a buffer separates two vowels.
"""

import hashlib
from pathlib import Path
from typing import Final

import numpy as np

from can_train.io.arrays import writing_folder
from can_train.io.records import write_text_atomic
from can_train_tasks.seq2seq.pair_tables import DEV, TEST, TRAIN, Tables
from can_train_tasks.seq2seq.settings import LanguageSettings

# Raise it whenever the same settings give other bytes, so that tables of an earlier version are not used.
GENERATOR_VERSION: Final = 1

_BACK, _FRONT = "aou", "eiü"
_VOWELS: Final = _BACK + _FRONT
_CONSONANTS: Final = "bdgklmnprstvyz"
_SOFTENED: Final = {"k": "g", "p": "b", "t": "d"}
_BUFFER: Final = "y"
# Suffixes by feature; A stands for the vowel a or e that agrees.
_NUMBERS: Final = {"SG": "", "PL": "lAr"}
_POSSESSORS: Final = {"": "", "PSS1S": "Am", "PSS2S": "An", "PSS1P": "AmAz"}
_CASES: Final = {"NOM": "", "ACC": "A", "LOC": "dA", "ABL": "dAn", "GEN": "An"}
_HELD_OUT: Final = 10  # training pairs for each development pair, and for each test pair
_MOST_SYLLABLES: Final = 4


def synthetic_tables(cache: Path, settings: LanguageSettings) -> Tables:
    """Returns the tables of the language in a folder under `cache`; writes them if they are missing.

    Raises:
        StateError: The tables cannot be written.
    """
    identity = f"{GENERATOR_VERSION}:{settings.seed}:{settings.words}"
    folder = cache / f"seq2seq-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    names = {name: f"synthetic.{name}.tsv" for name in (TRAIN, DEV, TEST)}
    if not folder.is_dir():
        with writing_folder(folder) as staged:
            for name, text in write_language(settings).items():
                write_text_atomic(staged / names[name], text)
    return Tables(**{name: folder / file for name, file in names.items()})


def write_language(settings: LanguageSettings) -> dict[str, str]:
    """Returns the text of each table, the training table last."""
    held_out = max(settings.words // _HELD_OUT, 1)
    rng = np.random.default_rng([settings.seed, GENERATOR_VERSION])
    lines: dict[str, None] = {}
    # No pair occurs twice, so no test pair is also a training pair.
    while len(lines) < settings.words + 2 * held_out:
        lines[_line(rng)] = None
    texts = ["".join(part) for part in np.split(np.array(list(lines), dtype=object), [held_out, 2 * held_out])]
    return dict(zip((TEST, DEV, TRAIN), texts, strict=True))


def inflect(lemma: str, number: str, possessor: str, case: str) -> str:
    """Returns a form of a lemma.

    >>> inflect("kitap", "SG", "PSS1S", "NOM"), inflect("ev", "PL", "", "LOC"), inflect("oda", "SG", "", "ACC")
    ('kitabam', 'evlerde', 'odaya')
    """
    form = lemma
    for pattern in filter(None, (_NUMBERS[number], _POSSESSORS[possessor], _CASES[case])):
        last_vowel = next(letter for letter in reversed(form) if letter in _VOWELS)
        suffix = pattern.replace("A", "a" if last_vowel in _BACK else "e")
        if suffix[0] in _VOWELS:
            end = form[-1] + _BUFFER if form[-1] in _VOWELS else _SOFTENED.get(form[-1], form[-1])
            form = form[:-1] + end
        form += suffix
    return form


def _line(rng: np.random.Generator) -> str:
    vowels = list(_BACK if rng.random() < 0.5 else _FRONT)
    # Most words are short and a few are long, as in real languages.
    syllables = min(int(rng.geometric(0.5)) + 1, _MOST_SYLLABLES)
    lemma = "".join(rng.choice(list(_CONSONANTS)) + rng.choice(vowels) for _ in range(syllables))
    lemma += rng.choice(list(_CONSONANTS)) if rng.random() < 0.6 else ""
    number, possessor, case = (str(rng.choice(list(of))) for of in (_NUMBERS, _POSSESSORS, _CASES))
    features = ";".join(part for part in ("N", case, number, possessor) if part)
    return f"{lemma}\t{inflect(lemma, number, possessor, case)}\t{features}\n"
