"""The words of the evaluation tasks: common English words, invented words and numbers.

A change of a word changes every seeded task: scores are comparable only between versions with the
same lists. Must not know the tasks or a tokenizer.
"""

import random

WORDS: tuple[str, ...] = tuple(
    """able acid admiral amber anchor angle apple april arch arrow atlas aunt autumn axis badge baker bamboo banner basil basket beach
beacon berry bird blanket blue board boat bone book border bottle branch brave bread brick bridge bright bronze brush bucket
butter button cabin cable camel camera candle canyon carbon carpet castle cedar chain chair cherry circle city clay clock cloud
clover coal coast copper coral corner cotton cradle crane creek crown crystal cube dance delta desert diamond dinner dragon dream
drum eagle earth east echo elbow ember engine evening fabric falcon farm feather fence field finger fire flame flower forest fork
fountain fox frost galaxy garden gate ghost giant ginger glass globe gold grain grape green guitar hammer harbor hawk hazel heart
hill honey horizon horse house ice index iron island ivory jacket jade jewel jungle kettle key king kitchen ladder lake lamp
lantern laser leaf lemon letter lily lion lobster lotus lunar magnet maple marble market meadow melon metal mirror moon morning
mountain music needle nest night north ocean olive onion orange orbit owl paint palace panda paper parrot pearl pencil pepper
piano pilot pine planet plate pocket pond purple quartz queen rabbit radio rain raven red ribbon ring river road robin rocket
rose ruby saddle sail salt sand scarf school shadow silk silver sky snow south spider spoon spring square stable star stone
storm sugar summer sun table tiger timber tower train tree tulip tunnel valley velvet violet wagon water west whale wheat wheel
willow window winter wolf wood yellow zebra
""".split()  # noqa: SIM905 - a list literal would have 254 lines
)

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def common_word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def invented_word(rng: random.Random, syllables: int) -> str:
    """An invented word: `syllables` pairs of consonant and vowel."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))


def number(rng: random.Random, digits: int) -> str:
    """A decimal number of exactly `digits` digits (a single digit may be 0)."""
    low = 0 if digits == 1 else 10 ** (digits - 1)
    return str(rng.randrange(low, 10**digits))
