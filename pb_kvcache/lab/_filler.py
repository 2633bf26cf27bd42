"""The text between the facts of a made prompt, and the names and words that the facts are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NAMES", "WORDS", "Filler", "shipped"]


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: People in made facts. The shipped filler names none of them.
NAMES = _split("""
    Amina Anton Astrid Beatrix Bruno Camila Cedric Clara Dario Diego Edith Elena Elias Emil Esther Fatima Felix Fiona
    Flora Frida Greta Gustav Hana Hannah Hector Helga Hugo Igor Ingrid Irene Isabel Ivan Jasmin Joana Jonas Julia Karim
    Katya Klara Lars Laura Leila Leon Lena Livia Lorenzo Lucia Luis Magnus Marco Maria Marta Matteo Maya Mila Miriam
    Mona Nadia Nils Nina Noor Nora Olga Oscar Otto Pablo Paula Pedro Petra Rafael Ramon Renata Rosa Ruth Samir Sara
    Selma Silvia Simon Sofia Stefan Sven Tamara Tania Teresa Theo Tomas Ursula Vera Victor Viola Walter Wanda Yara Yusuf
    Zara Zoe
""")
#: Answers of made facts: things, one word each. The shipped filler has none of them.
WORDS = _split("""
    acorn almond anchor apricot arrow bakery balloon bamboo barley basket beaver berry blanket bottle bracelet bread
    bridge bronze bucket butter button cactus camel candle canoe canyon carpet carrot castle cedar ceramic cherry
    chimney cinnamon clover coconut copper coral cotton cradle crystal curtain daisy desert diamond dolphin donkey
    dragon eagle emerald falcon feather fiddle flute forest fountain garden garlic ginger glacier goose granite guitar
    hammer harbor harvest hazel helmet honey island ivory jacket jasmine kettle kitten ladder lagoon lantern lavender
    lemon leopard lettuce lizard lobster magnet mango maple marble meadow melon mirror mountain mushroom mustard needle
    nutmeg oasis ocean olive onion orchard otter oyster palace panther papaya parrot peach peanut pearl pebble pelican
    pencil penguin pepper pillow planet plum pottery pumpkin quartz rabbit raccoon radish raven ribbon river rocket ruby
    saddle saffron salmon sapphire scarf shadow shovel silver sparrow spider spinach squirrel statue sugar sunset swan
    timber tomato trumpet tulip turnip turtle umbrella valley vanilla velvet violin volcano wagon walnut whale willow
    winter wolf zebra
""")

#: A sentence of a filler without full stops, such as code, ends here at the latest: the facts need gaps to go into.
_LONGEST = 40
#: Fewer words would be repeated many times in a prompt, and a model would see through them.
_FEWEST = 100


class Filler:
    """A text as sentences, from which every prompt takes another part.

    Parameters
    ----------
    text
        At least 100 words, in any form: a sentence ends at a full stop, at a line's end, or after 40 words.

    Raises
    ------
    TypeError
        The text is not a string.
    ValueError
        The text has fewer than 100 words.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"filler: must be the text itself, a string, not {type(text).__name__}")
        ends = re.split(r"(?<=[.!?])[\"')]*\s+|\n", text)
        split = [sentence.split() for sentence in ends]
        self.sentences = [words[i : i + _LONGEST] for words in split for i in range(0, len(words), _LONGEST)]
        count = sum(map(len, self.sentences))
        if count < _FEWEST:
            raise ValueError(
                f"filler: has {count} words, must have at least {_FEWEST}; give a longer text, or none for the "
                "shipped one"
            )
        self.vocabulary = {word.lower() for word in re.findall(r"\w+", text)}

    def part(self, place: float, count: int) -> list[str]:
        """Return `count` words as sentences, from a place on, 0 to 1 of the text. Its end is followed by its start."""
        part, index = [], int(place * len(self.sentences))
        while count > 0:
            words = self.sentences[index % len(self.sentences)]
            part.append(" ".join(words[:count]) + (" ..." if count < len(words) else ""))
            count -= len(words)
            index += 1
        return part

    def without(self, what: str, wanted: Sequence[str], least: int) -> list[str]:
        """Return the names or words that the text does not have, so that a made fact is its only mention.

        Raises
        ------
        ValueError
            The text leaves fewer than `least`.
        """
        free = [word for word in wanted if word.lower() not in self.vocabulary]
        if len(free) < least:
            raise ValueError(
                f"filler: leaves {len(free)} of the {len(wanted)} {what} that questions are made of, {least} are "
                "needed; give another text, or part of it"
            )
        return free


def shipped() -> str:
    """Return the filler that ships with the package, see ``pb_kvcache/data/README.md``."""
    return (Path(__file__).parents[1] / "data" / "filler.txt").read_text(encoding="utf-8")
