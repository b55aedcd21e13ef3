"""Let SmolLM2-135M-Instruct write the children's stories that the embedded model learns from.

Why the stories are written by a model: the embedded model must come with a clear licence, and
text sampled from an Apache-2.0 model has one.  Why this file has its own forward pass: tens of
millions of tokens are needed, and one fact makes sampling them very cheap.  If every row of a
batch has the *same prompt length*, there is no padding, so attention needs no mask and a plain
list of key/value tensors is the whole cache.  So prompts are made in excess, grouped by length,
and sampled in batches of thousands of rows; rows that have ended are dropped as it goes.

    python scripts/make_stories.py --model ~/.cache/nanovllm/SmolLM2-135M-Instruct --out DIR

The second source of stories, ``compose``, is a grammar of plots written by hand; why it is needed
is said there.
"""

# ruff: noqa: SIM905 - long lists of words are easier to read and to edit as one string

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

# ----------------------------------------------------------------------------------------------
# What the stories are about
# ----------------------------------------------------------------------------------------------

GIRLS = (
    "Lily Mia Emma Sara Anna Lucy Zoe Ella Ruby Nora Maya Rosie Daisy Ivy Alice Molly Clara Tina "
    "Amy Jane Sophie Luna Poppy Hana Leila Nina Grace Kate Bella Maria"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Jack Tim Finn Oscar Henry Noah Theo Billy Toby Charlie Luke Adam Joe "
    "Peter Hugo Eli Omar Ravi Kenji Marco Danny Felix Arthur Jake Will"
).split()
PETS = (
    "Fluffy Spot Buddy Whiskers Pip Coco Teddy Bubbles Sunny Rusty Ginger Snowy Patch Honey "
    "Nibbles Shadow Pepper Biscuit Dot Mimi Bobo Tiny Button Peanut Fuzzy Hoppy Benny "
    "Kiki Milo Olly"
).split()
ANIMALS = (
    "cat dog rabbit bear fox mouse bird duck frog turtle squirrel owl pig cow horse sheep goat "
    "chicken hen fish bee butterfly ladybug ant snail elephant lion tiger monkey giraffe panda "
    "penguin dolphin whale hedgehog deer wolf kitten puppy bunny pony lamb duckling caterpillar "
    "beaver otter parrot crab dragon dinosaur"
).split()
THINGS = (
    "robot|toy car|little train|teddy bear|red balloon|snowman|kite|boat|doll|little cloud|"
    "star|tree|truck|tractor|rocket|ghost|fairy|wizard|baby dragon|unicorn|giant|pirate"
).split("|")
PEOPLE = (
    "farmer|baker|king|queen|prince|princess|teacher|fisherman|gardener|doctor|painter|sailor|"
    "grandmother|grandfather|knight|builder|shopkeeper"
).split("|")
WOMEN = {"queen", "princess", "grandmother"}
MEN = {"king", "prince", "grandfather", "fisherman"}
ADJECTIVES = (
    "little brave kind happy sad shy clever lazy hungry curious small big funny lonely friendly "
    "gentle silly proud quiet sleepy cheerful careful grumpy tiny young old playful helpful good "
    "loud strong fast slow smart"
).split()
PLACES = (
    "the park|the forest|a small village|the garden|the beach|a farm|the school|the river|"
    "a big city|the zoo|the kitchen|a cave|the mountains|the lake|an old house|the market|"
    "the playground|the library|a castle|the sea|the snow|a meadow|the hill|the pond|the shop|"
    "the desert|an island|the jungle|the attic|the barn"
).split("|")
OBJECTS = (
    "ball|cake|apple|hat|book|flower|kite|box|key|blanket|drum|bell|cup|spoon|boat|shoe|ribbon|"
    "stone|stick|leaf|carrot|cookie|pie|egg|shell|feather|basket|coat|umbrella|candle|lamp|map|"
    "coin|ring|crayon|bucket|rope|ladder|wagon|bike|puzzle|button|mirror|scarf|honey|pumpkin|"
    "strawberry|banana|sandwich|soup|seed|nest|toy|doll|letter|picture|bag|clock|whistle|net"
).split("|")
EVENTS = (
    "finds a lost {o}|learns to share a {o}|is afraid of the dark|makes a new friend|gets lost|"
    "helps a friend who is hurt|loses a {o}|wants to learn to swim|wants to fly|plants a seed|"
    "bakes a cake for a friend|tells a lie and says sorry|has a birthday|builds a house|"
    "goes on a picnic|is scared of a loud noise|finds a secret door|wins a race|helps to clean up|"
    "saves a little bird|can not sleep|sees snow for the first time|gives a {o} to someone|"
    "looks for food|breaks a {o} by mistake|goes to the doctor|learns to say thank you|"
    "does not want to go to bed|plays hide and seek|finds a big {o}|makes a {o}|rides a boat|"
    "meets a stranger who is kind|wants a {o} very much|is too small to reach a {o}|"
    "learns to wait|gets stuck in the mud|paints a picture|hears a strange sound|"
    "dances in the rain|catches a cold|misses mother|learns to be brave|asks for help|"
    "tries something new|climbs a tall tree|looks at the stars|does not listen and gets in trouble|"
    "fixes a {o}|"
    "trades a {o} for something better"
).split("|")
LIKES = (
    "play|run|sing|dance|draw|read books|eat|jump|swim|climb trees|play with friends|help others|"
    "look at the stars|play in the rain|play outside|sleep|explore|tell stories|pick flowers|"
    "make things|ride a bike|bake|play in the mud|watch the birds|play with a {o}"
).split("|")


@dataclass
class Idea:
    """What one story is asked to be about."""

    hero: str  # with article: "a brave cat"
    noun: str  # "cat"
    name: str
    place: str
    thing: str  # an object that may play a part
    event: str
    pronoun: str
    opening: str  # the first words of the story, written for the model


def a(phrase: str) -> str:
    vowel = phrase[0] in "aeiou" and not phrase.startswith("unicorn")
    return ("an " if vowel else "a ") + phrase


def draw_idea(rng: random.Random) -> Idea:
    """Draw one idea; slightly more than half the openings are 'Once upon a time'."""
    kind = rng.random()
    adjective = rng.choice(ADJECTIVES)
    if kind < 0.40:
        girl = rng.random() < 0.5
        noun, name = ("girl", rng.choice(GIRLS)) if girl else ("boy", rng.choice(BOYS))
        pronoun = "She" if girl else "He"
    elif kind < 0.80:
        noun, name = rng.choice(ANIMALS), rng.choice(PETS)
        pronoun = rng.choice(("He", "She"))
    elif kind < 0.92:
        noun, name, pronoun = rng.choice(THINGS), rng.choice(PETS), "It"
    else:
        noun = rng.choice(PEOPLE)
        girl = noun in WOMEN or (noun not in MEN and rng.random() < 0.5)
        name, pronoun = (rng.choice(GIRLS), "She") if girl else (rng.choice(BOYS), "He")
    thing, place = rng.choice(OBJECTS), rng.choice(PLACES)
    event = rng.choice(EVENTS).replace("a {o}", a(thing)).format(o=thing)
    likes = rng.choice(LIKES).replace("a {o}", a(thing))
    hero = a(f"{adjective} {noun}")
    near = f"near {place}" if place.startswith("the ") else f"in {place}"
    openings = (
        (14, f"Once upon a time, there was {hero} named {name}. {pronoun} loved to {likes}."),
        (12, f"Once upon a time, there was {hero} named {name}."),
        (8, f"Once upon a time, {near}, there lived {hero} named {name}."),
        (6, f"Once upon a time, there was {hero}."),
        (8, f"Once upon a time, there was {hero} named {name}. {pronoun} lived {near}. One day,"),
        (8, f"Once upon a time, there was {hero} named {name}. One day, {name} found {a(thing)}."),
        (
            6,
            f"One day, {hero} named {name} went to {place}. "
            f"There {pronoun.lower()} saw {a(thing)}.",
        ),
        (6, "Once upon a time, there"),
        (5, "Once upon a time,"),
        (6, f"Once upon a time, {name} the {noun}"),
        (6, f"One day, {hero} named {name}"),
        (5, f"One sunny day, {name} the {noun}"),
        (4, f"{name} was {hero}. {pronoun} lived {near}."),
        (4, f"{name} was {hero} who loved to {likes}."),
        (4, f"There once was {hero} named {name}."),
        (3, f"One morning, {name} woke up and"),
        (3, f"It was a cold day. {name} the {noun}"),
        (3, f"{name} and"),
        (3, f"One night, {name}"),
    )
    opening = rng.choices([text for _, text in openings], [w for w, _ in openings])[0]
    return Idea(hero, noun, name, place, thing, event, pronoun, opening)


def request(idea: Idea, rng: random.Random) -> str:
    """What SmolLM2 is asked for (the embedded model is later asked in far fewer words).

    It is *not* asked for simple words and short sentences: told so, this small model falls into
    saying "a special special thing" over and over, while its natural style stays readable.
    """
    who = f"{idea.hero} named {idea.name} who {idea.event}"
    return rng.choice(
        (
            f"Write a short children's story about {who}.",
            f"Write a short children's story, one paragraph long, about {who}.",
            f"Tell me a very short bedtime story about {who}. Give it a happy ending.",
            f"Write a short story for young children about {who} near {idea.place}.",
            f"Write a short picture book story about {who}.",
        )
    )


def embedded_request(idea: Idea, text: str, rng: random.Random) -> str:
    """A short user message that the finished story really answers."""
    choices = ["Tell me a story.", "Write a short story.", "Tell me a bedtime story."]
    if idea.noun in text:
        plain = a(idea.noun)
        choices = [f"Write a story about {x}." for x in (idea.hero, idea.hero, plain)]
        choices += [f"Tell me a story about {x}." for x in (idea.hero, plain)]
        choices += [
            f"Write a short story about {idea.hero}.",
            f"Once upon a time there was {plain}.",
        ]
        choices += [f"Can you tell me a story about {idea.hero}?", "Tell me a story."]
        if idea.name in text:
            choices += [f"Write a story about {idea.hero} named {idea.name}."] * 2
            choices += [f"Tell me a story about {idea.name} the {idea.noun}."]
        if re.search(rf"\b{idea.thing}\b", text):
            choices += [f"Write a story about {plain} and {a(idea.thing)}."] * 3
        if idea.place.split()[-1] in text:
            choices += [f"Tell me a story about {plain} in {idea.place}."] * 2
    return rng.choice(choices)


# ----------------------------------------------------------------------------------------------
# Stories from a grammar
# ----------------------------------------------------------------------------------------------
# SmolLM2-135M writes fluent sentences, but its plots wander and rarely end.  A model of a few
# million weights learns from examples that something happens, is put right, and then the story
# is over; so part of the training text is composed from the plots below.  A plot is a list of
# beats and a beat a list of ways to say it.  N: the hero (noun n), F: the friend (noun f).

SKILLS = {
    "swim": ("swimming", "in the pond"),
    "ride a bike": ("riding", "on the long road"),
    "climb the tall tree": ("climbing", "near the old fence"),
    "draw a horse": ("drawing", "at the table"),
    "dance": ("dancing", "in the big room"),
    "whistle": ("whistling", "on the hill"),
    "tie a knot": ("tying knots", "on the steps"),
    "catch a ball": ("playing catch", "on the grass"),
    "skate": ("skating", "on the frozen lake"),
    "sing": ("singing", "under the big tree"),
    "read": ("reading", "by the window"),
    "jump over the stream": ("jumping", "by the stream"),
}
FOODS = "cake|bread|soup|apple pie|honey|berries|cheese|pancakes|nuts|carrots|rice|cookies".split(
    "|"
)
COLORS = "red blue green yellow white brown pink orange purple golden".split()
PLOT_PLACES = [p for p in PLACES if p.startswith("the ")]
WEATHER = "sunny warm windy cold rainy snowy bright cloudy".split()

INTRO = [
    "Once upon a time, there was {hero} named {N}.",
    "Once upon a time, there was {hero} named {N}. {He} lived near {P}.",
    "Once upon a time, there was {hero} called {N}. {He} lived in a small house near {P}.",
    "Once upon a time, in a little house near {P}, there lived {hero} named {N}.",
    "Once upon a time, there lived {hero}. {His} name was {N}.",
    "Once upon a time, {N} the {n} lived near {P} with {his} mother.",
    "There once was {hero} named {N} who lived near {P}.",
    "{N} was {hero}. {He} lived near {P}.",
    "Near {P}, there lived {hero} named {N}.",
    "One {w} day, {hero} named {N} was near {P}.",
]
LIKE = [
    "{He} loved to {like}.",
    "Every day, {he} liked to {like}.",
    "{N} loved to {like} more than anything.",
    "{He} was always happy when {he} could {like}.",
    "Most of all, {N} loved {his} {c} {o}.",
    "",
    "",
]
ENDING = [
    "From that day on, {N} and {F} were best friends.",
    "{N} was very happy, and so was {F}.",
    "And they lived happily ever after.",
    "That night, {N} went to bed with a big smile.",
    "{N} and {F} laughed and played until the sun went down.",
    '"What a good day!" said {N}. {F} thought so too.',
    "After that, {N} and {F} met near {P} every day.",
    "{N} went home and told {his} mother all about it. She gave {him} a big hug.",
    "It was the best day of all.",
    "And {N} never forgot what {F} had done.",
]
PLOTS: dict[str, list[list[str]]] = {
    "loses {ao}": [
        [
            "One day, {N} could not find {his} {c} {o}.",
            "One {w} morning, {N} lost {his} {c} {o}.",
            "One day, {N} went to {P} with {his} {c} {o}. When {he} came home, the {o} was gone.",
        ],
        [
            "{He} looked under the bed and behind the door, but it was not there.",
            "{He} looked in the kitchen. {He} looked in the garden. It was not there.",
            "{He} looked everywhere, but {he} could not see it.",
        ],
        [
            "{N} was very sad and began to cry.",
            "{N} sat down and felt sad.",
            '"Oh no!" cried {N}. "My {o} is gone!"',
        ],
        [
            "Just then, {a_f} named {F} came by.",
            "{A_f} named {F} heard {him}.",
            "{His} friend {F} the {f} came to see {him}.",
        ],
        [
            '"Why are you sad?" asked {F}.',
            '"What is wrong, {N}?" asked {F}.',
            '"Please do not cry," said {F}. "What happened?"',
        ],
        ['"I lost my {o}," said {N}.', '"I can not find my {c} {o}," said {N}.'],
        ['"I will help you look for it," said {F}.', '"Let us look together," said {F}.'],
        [
            "They walked to {P} and looked all around.",
            "They went back to {P}.",
            "They looked near the trees and by the road.",
        ],
        [
            "At last, {F} saw something {c} under a bush. It was the {o}!",
            "Then {N} saw the {o} behind a big stone.",
            "There, in the tall grass, was the {o}!",
        ],
        [
            '"Thank you, {F}!" said {N}. {He} gave {fhim} a hug.',
            '{N} jumped up and down. "You found it! Thank you!"',
        ],
    ],
    "is hungry": [
        [
            "One day, {N} had some {food} in a basket.",
            "One {w} day, {N} made some {food}.",
            "One morning, {his} mother gave {N} some {food}.",
        ],
        [
            "{He} sat down near {P} to eat.",
            "{He} went to {P} to have a picnic.",
            "It smelled so good that {he} wanted to eat it all.",
        ],
        [
            "Then {he} saw {a_f} named {F}.",
            "{A_f} named {F} came up to {him}.",
            "Just then, {N} saw {a_f} who sat all alone. {FHis} name was {F}.",
        ],
        [
            '"I am so hungry," said {F}. "I have not eaten all day."',
            '{F} looked at the {food}. "I have no food," {fhe} said in a small voice.',
        ],
        [
            "{N} looked at the {food}. {He} wanted to keep it, but {F} looked so sad.",
            "{N} thought for a moment. There was not much {food}.",
            "At first, {N} did not want to share.",
        ],
        [
            '"Here, you can have half," said {N}.',
            'Then {he} smiled. "We can share it," said {N}.',
            '"Come and sit with me," said {N}. "We will eat together."',
        ],
        [
            "They ate the {food}, and it was very good.",
            "{F} ate and ate until {fhe} was full.",
            "The {food} tasted even better with a friend.",
        ],
        [
            '"You are very kind," said {F}. "Thank you!"',
            '"Thank you, {N}," said {F}. "You made me happy."',
        ],
        [
            "The next day, {F} came back with a {c} {o} for {N}.",
            "Then {F} showed {N} a secret place with many flowers.",
            "",
        ],
        ["{N} learned that it feels good to share.", "Sharing made them both happy.", ""],
    ],
    "is afraid of the dark": [
        [
            "One night, {N} was in bed. It was very dark.",
            "One night, {N} could not sleep.",
            "When the sun went down, {N} was always afraid.",
        ],
        [
            "Then {he} heard a strange sound. Tap, tap, tap!",
            "There was a noise at the window. Tap, tap!",
            "Something went bump in the dark.",
        ],
        [
            '"Is it a monster?" {he} thought.',
            '"Who is there?" asked {N} in a small voice.',
            "{He} pulled the blanket over {his} head.",
        ],
        [
            "But {N} wanted to be brave.",
            "{N} took a deep breath.",
            "{He} counted to three and got up.",
        ],
        [
            "{He} took {his} lamp and walked to the window.",
            "Very slowly, {he} opened the door.",
            "{He} looked outside, and what did {he} see?",
        ],
        [
            "It was not a monster at all. It was {a_f} named {F}!",
            "There sat a little {f}. {FHis} name was {F}.",
            "It was only {F} the {f}, who was cold and wet.",
        ],
        [
            '"I am sorry," said {F}. "I was afraid to be alone."',
            '"Please let me in," said {F}. "I do not like the dark."',
        ],
        [
            '{N} laughed. "I was afraid too! But now we are two."',
            '"Come in," said {N}. "We can be brave together."',
        ],
        [
            "{N} gave {F} a warm blanket.",
            "They looked at the moon and the stars.",
            "They sat together and told stories.",
        ],
        [
            "Soon they were both asleep.",
            "After that, the dark was not so bad.",
            "{N} was not afraid of the dark any more.",
        ],
    ],
    "learns to {skill}": [
        [
            "{N} wanted to learn to {skill}.",
            "One day, {N} saw {F} the {f} {doing} {where}. {N} wanted to do it too.",
            "All {his} friends could {skill}, but {N} could not.",
        ],
        [
            "{He} tried once, but it did not work.",
            "{He} tried and tried, but {he} could not do it.",
            "The first time, {he} fell down.",
        ],
        [
            '"I will never learn it," said {N}.',
            '"It is too hard for me," {he} said.',
            "{N} was sad and wanted to give up.",
        ],
        [
            '"Do not give up," said {F} the {f}. "I could not do it at first."',
            'Then {F} the {f} came. "I can help you," {fhe} said.',
            '{F} the {f} smiled at {him}. "Try one more time," {fhe} said.',
        ],
        [
            "{F} showed {him} how to do it, step by step.",
            "Every day, they went {doing} {where}.",
            "So they began again, very slowly.",
        ],
        [
            "On the first day, it was hard. On the second day, it was better.",
            "{N} fell many times, but {he} always got up again.",
            "{He} worked hard every day.",
        ],
        [
            "And then, one {w} day, {N} did it!",
            "At last, {N} could {skill}!",
            '"Look at me!" cried {N}. "I can {skill}!"',
        ],
        [
            '"I knew you could do it," said {F}.',
            "{F} clapped and cheered.",
            "{His} mother was so proud of {him}.",
        ],
        [
            "{N} learned that you must never give up.",
            "Now {N} helps others who want to learn to {skill}.",
            "",
        ],
    ],
    "breaks {ao}": [
        ["One day, {N} played inside the house.", "One {w} day, {N} ran through the house."],
        [
            '{His} mother said, "Please be careful." But {N} did not listen.',
            "{He} ran very fast and did not look.",
            "{He} jumped up and down on the bed.",
        ],
        [
            "Crash! {His} mother's {c} {o} fell down and broke.",
            "Then {he} bumped into the table. The {c} {o} fell on the floor and broke.",
        ],
        [
            '"Oh no!" said {N}. "What should I do?"',
            "{N} was afraid. {He} hid the {o} under the bed.",
        ],
        [
            '"Do not tell anyone," {he} thought. But {he} felt bad inside.',
            "{He} could not play, and {he} could not eat. {He} felt very bad.",
        ],
        ["{He} went to {F} the {f} and told {fhim} about it.", "{F} the {f} saw that {N} was sad."],
        [
            '"You should tell the truth," said {F}.',
            '"If you say sorry, you will feel better," said {F}.',
        ],
        [
            'So {N} went to {his} mother. "I broke your {o}," {he} said. "I am sorry."',
            '{N} went home. "Mother, I broke the {o}," {he} said. "I am very sorry."',
        ],
        [
            '{His} mother was not angry. "Thank you for telling me the truth," she said.',
            '{His} mother gave {him} a hug. "I am glad you told me," she said.',
        ],
        ["They fixed the {o} together.", "Then they put the {o} together again with glue."],
        ["{N} felt happy again.", "After that, {N} was always careful.", ""],
    ],
    "wants a friend": [
        [
            "But {N} had no friends, and {he} was lonely.",
            "{N} was sad because {he} had no one to play with.",
            "Every day, {N} played alone with {his} {c} {o}.",
        ],
        [
            "One {w} day, {he} went to {P}.",
            "One day, {N} went for a long walk.",
            '"I will find a friend today," said {N}, and {he} walked to {P}.',
        ],
        ["There {he} met {a_f}.", "{He} saw {a_f} who sat under a tree.", "By the road sat {a_f}."],
        [
            '"Hello," said {N}. "What is your name?"',
            '"Hello! My name is {N}," {he} said. "Who are you?"',
        ],
        ['"My name is {F}," said the {f}.', 'The {f} smiled. "I am {F}," {fhe} said.'],
        [
            '"Do you want to play with me?" asked {N}.',
            '"Would you like to be my friend?" asked {N}.',
        ],
        ['"Yes!" said {F}. "I was lonely too."', '{F} jumped up. "I would love to," {fhe} said.'],
        [
            "They played with the {o} all day long.",
            "They ran and jumped and sang songs.",
            "They played hide and seek near {P}.",
        ],
        [
            "When they were hungry, they shared some {food}.",
            "Then they ate {food} and talked for a long time.",
        ],
    ],
    "gets lost": [
        [
            "One day, {N} walked into {P} to look for {food}.",
            "One {w} day, {N} followed a butterfly to {P}.",
            "One morning, {N} went too far from home.",
        ],
        [
            "{He} walked and walked. Soon {he} did not know where {he} was.",
            "When {he} looked back, {he} could not see {his} house.",
            "All the trees looked the same.",
        ],
        [
            '"I am lost!" cried {N}.',
            '"How will I get home?" {he} asked.',
            "{N} was scared and began to cry.",
        ],
        [
            "{A_f} named {F} heard {him} and came near.",
            "Up in a tree sat {a_f} named {F}.",
            "Then {he} heard a kind voice. It was {a_f} named {F}.",
        ],
        [
            '"Do not be afraid," said {F}. "I know the way."',
            '"I can help you," said {F}. "Where do you live?"',
        ],
        [
            '"I live in a little house with a {c} door," said {N}.',
            '"My house is near the big tree," said {N}.',
        ],
        ['"I know that house!" said {F}. "Follow me."', '"Come with me," said {F}.'],
        [
            "They walked over the hill and across the river.",
            "They went past the pond and over the bridge.",
            "They walked side by side for a long time.",
        ],
        [
            "At last, {N} saw {his} house. {His} mother was at the door.",
            "And there was {his} mother! She ran to {him} and gave {him} a big hug.",
        ],
        [
            '"Thank you for helping {N}," said {his} mother. She gave {F} some {food}.',
            '"Thank you, {F}," said {N}. "You are a true friend."',
        ],
        ["After that, {N} always told {his} mother where {he} went.", ""],
    ],
    "plants a seed": [
        [
            "One day, {N} found a tiny seed near {P}.",
            "One {w} day, {F} the {f} gave {N} a little seed.",
        ],
        [
            "{He} put it in the ground and gave it some water.",
            "{He} made a small hole and put the seed in it.",
        ],
        [
            "The next day, {he} looked, but there was nothing to see.",
            "{N} waited and waited, but nothing happened.",
        ],
        ['"Why does it not grow?" asked {N}.', '"Maybe it is a bad seed," said {N}.'],
        [
            '"You must wait," said {F} the {f}. "Good things take time."',
            '"It needs water, sun, and time," said {F} the {f}.',
        ],
        [
            "So {N} gave it water every day.",
            "Every morning, {N} came with a bucket of water.",
            "{N} sang to the seed every day.",
        ],
        [
            "Then it rained, and the sun came out.",
            "Days went by.",
            "One week later, there was a small green leaf.",
        ],
        [
            "And one morning, there was a big {c} flower!",
            "It grew and grew. Soon it was as tall as {N}!",
            "At last, there was a beautiful {c} flower.",
        ],
        [
            '"Look, {F}!" cried {N}. "It is so pretty!"',
            '"You were right," {he} said to {F}. "I had to wait."',
        ],
        [
            "The bees and the butterflies came to see it.",
            "They sat beside the flower and ate {food}.",
        ],
    ],
    "has a birthday": [
        ["It was {his} birthday, and {N} woke up early.", "One {w} day, it was {his} birthday."],
        [
            "But nobody said a word about it.",
            "{He} went to see {F} the {f}, but {F} was not at home.",
            "{His} mother was busy, and {his} friends were not there.",
        ],
        [
            '"They all forgot my birthday," said {N}.',
            "{N} was sad. {He} sat down near {P} all alone.",
        ],
        ["Then {he} heard someone call {his} name.", "Just then, {F} the {f} ran up to {him}."],
        ['"Come quickly!" said {F}. "I need your help!"', '"{N}, come with me," said {F}.'],
        ["They ran to {his} house. It was dark inside.", "{N} opened the door."],
        ['"Surprise!" shouted all {his} friends.', '"Happy birthday, {N}!" everyone cried.'],
        ["There was a big cake with {c} candles.", "There was {food} and a big {c} cake."],
        [
            "{F} gave {him} {ao}. It was just what {he} wanted.",
            "{N} opened a big box. Inside was a {c} {o}!",
        ],
        ['"Thank you, everyone!" said {N}. "You did not forget!"', "They danced and sang all day."],
    ],
    "runs in a race": [
        ["One day, there was a big race near {P}.", "One {w} day, all the animals ran a race."],
        [
            "{N} wanted to win. The prize was a {c} {o}.",
            '"I will win the race," said {N}.',
            "The winner would get a big basket of {food}.",
        ],
        [
            "One, two, three, go! {N} ran as fast as {he} could.",
            "{N} was the first to start, and {he} ran very fast.",
        ],
        [
            "But then {he} saw {F} the {f} on the ground.",
            "Soon {he} heard someone cry. It was {F} the {f}.",
        ],
        ['"I hurt my leg," said {F}.', '"I fell down and I can not get up," said {F}.'],
        [
            "{N} looked at the others, who ran past. Then {he} stopped.",
            "{N} wanted to win, but {he} wanted to help {F} even more.",
        ],
        ['"Hold on to me," said {N}. "We will go together."', '"I will help you," said {N}.'],
        [
            "They came in last, but everyone cheered for them.",
            "They were the last ones, but nobody laughed.",
        ],
        [
            '"You did not win the race," said the king, "but you have the biggest heart." '
            "He gave {N} the prize.",
            "Everyone said that {N} was the true winner.",
        ],
        ["{N} shared the prize with {F}.", ""],
    ],
    "finds {ao}": [
        [
            "One {w} day, {N} found a {c} {o} near {P}.",
            "One day, {N} walked near {P}. There {he} saw a {c} {o}.",
        ],
        [
            '"What a pretty {o}!" said {N}. "I will keep it."',
            "It was the best {o} {he} had ever seen.",
        ],
        ["{He} took it home and played with it.", "{He} put it in {his} bag."],
        [
            "Then {he} met {F} the {f}. {F} was crying.",
            "On the way home, {he} saw {F} the {f}, who looked very sad.",
        ],
        [
            '"I lost my {o}," said {F}. "My grandmother gave it to me."',
            '"Have you seen my {c} {o}?" asked {F}. "I can not find it."',
        ],
        ["{N} looked down. {He} liked the {o} so much.", "{N} did not know what to say."],
        ["But {he} knew what was right.", "But {he} did not want {F} to be sad."],
        [
            '"Here it is," said {N}. "I found it near {P}."',
            'So {N} gave the {o} back. "It is yours," {he} said.',
        ],
        ['"Oh, thank you!" said {F}. "You are so kind."', "{F} was so happy that {fhe} danced."],
        [
            '"We can play with it together," said {F}.',
            "Then {F} let {N} play with the {o} every day.",
        ],
    ],
    "learns to take turns": [
        [
            "One day, {N} and {F} the {f} both wanted to play with the {c} {o}.",
            "{N} had a friend, {F} the {f}. One {w} day, they found a {c} {o}.",
        ],
        ['"It is mine!" said {N}.', '"I saw it first!" said {N}.'],
        ['"No, it is mine!" said {F}.', '"No, give it to me!" said {F}.'],
        ["They pulled and pulled. They were both angry.", "They shouted at each other."],
        ["Then a wise old owl came by.", "{His} mother heard the noise and came out."],
        [
            '"Why do you fight?" came the question. "You can take turns."',
            '"If you fight, nobody can play," they were told. '
            '"Take turns, and you can both have fun."',
        ],
        ["{N} looked at {F}. {F} looked at {N}.", "They stopped and thought about it."],
        ['"I am sorry," said {N}. "You can go first."', '"You can have it first," said {N}.'],
        [
            '"I am sorry too," said {F}. "Thank you."',
            '"Thank you," said {F}. "Then it is your turn."',
        ],
        ["They took turns, and it was much more fun.", "First {F} played, and then {N} played."],
    ],
    "helps a sick friend": [
        [
            "One day, {N} went to see {F} the {f}.",
            "One {w} morning, {N} knocked on the door of {F} the {f}.",
        ],
        ["But {F} was in bed.", "Nobody came to the door. {F} was sick."],
        [
            '"I am sick," said {F}. "I can not play today."',
            '"My head hurts," said {F} in a small voice.',
        ],
        ['"I will take care of you," said {N}.', "{N} wanted to help."],
        [
            "{He} ran home and made some hot soup.",
            "{He} went to {P} and picked some flowers.",
            "{He} brought a warm blanket and {his} {c} {o}.",
        ],
        ["Then {he} told {F} a funny story.", "{N} sat by the bed and sang a song."],
        [
            '{F} laughed. "I feel better now," {fhe} said.',
            "{F} smiled for the first time that day.",
        ],
        ["After three days, {F} was well again.", "The next day, {F} could get up."],
        [
            '"You are a good friend," said {F}. "You helped me to get well."',
            '"Thank you for the soup," said {F}.',
        ],
        ["They went outside to play.", "Then they went to {P} together."],
    ],
    "builds a house": [
        [
            "One {w} day, {N} wanted to build a house of sticks.",
            "One day, {N} built a tall tower near {P}.",
        ],
        ["{He} worked all morning.", "{He} put one piece on top of the other."],
        [
            "But then the wind came. Whoosh! It all fell down.",
            "But it was not strong. Crash! It fell down.",
        ],
        ['"Oh no," said {N}. "All my work is gone."', "{N} was sad and a little angry."],
        [
            '{F} the {f} saw it. "Can I help you?" {fhe} asked.',
            '"We can build it again," said {F} the {f}.',
        ],
        [
            '"Let us use big stones this time," said {F}.',
            '"It must be wide at the bottom," said {F}.',
        ],
        [
            "So they worked together. {N} carried the stones, and {F} put them in place.",
            "{N} and {F} worked until the sun was low.",
        ],
        ["The wind came again, but this time it did not fall.", "Now it was big and strong."],
        ['"We did it!" cried {N}.', '"Together we are strong," said {N}.'],
        ["They sat inside and ate {food}.", "They put a {c} flag on top."],
    ],
    "does not listen": [
        [
            'One day, {his} mother said, "Do not go to {P} alone."',
            '"Stay near the house," said {his} mother one {w} day.',
        ],
        [
            "But {N} did not listen. {He} wanted to see what was there.",
            '"I am big," thought {N}, and {he} went away.',
        ],
        ["It was fun at first.", "{He} ran and laughed."],
        [
            "Then {he} slipped and fell into the mud.",
            "But then {he} fell into a deep hole.",
            "Then {his} foot got stuck between two stones.",
        ],
        ["{He} could not get out.", "{He} pulled and pulled, but it did not help."],
        ['"Help! Help!" {he} cried.', '"Can anyone hear me?" {he} called.'],
        ["{F} the {f} heard {him} and ran to help.", "Luckily, {a_f} named {F} was near."],
        [
            "{F} found a long rope and pulled {him} out.",
            "{F} held out a stick, and {N} took it. One, two, three! {He} was free.",
        ],
        ['"Thank you," said {N}. "I was so scared."', '"You saved me!" said {N}.'],
        [
            '{N} went home and said, "I am sorry, Mother. I should have listened."',
            "At home, {he} told {his} mother everything and said sorry.",
        ],
        [
            "{His} mother washed {him} and gave {him} some {food}.",
            "{His} mother was glad that {he} was safe.",
        ],
    ],
    "finds a little bird": [
        [
            "One {w} day, {N} saw a little bird on the ground.",
            "One day, {N} heard a small sound near {P}. It was a little bird.",
        ],
        ["It had a hurt wing and could not fly.", "It had fallen out of its nest."],
        ['"Poor little bird," said {N}.', '"Do not be afraid," {he} said. "I will help you."'],
        ["{He} asked {F} the {f} what to do.", "{F} the {f} came to help."],
        ['"We must keep it warm," said {F}.', '"It needs food and water," said {F}.'],
        [
            "They put the bird in a box with soft grass.",
            "They made a little bed for it in {his} {c} hat.",
        ],
        ["Every day, they gave it water and seeds.", "They took care of it day and night."],
        ["Soon the bird could sing again.", "After some days, it opened its wings."],
        [
            "One morning, it flew up into the blue sky.",
            "Then it flew out of the window and up to the clouds.",
        ],
        [
            '"Goodbye, little bird!" called {N} and {F}.',
            "{N} was a little sad, but {he} was also very happy.",
        ],
        ["The next day, the bird came back and sang a song for them.", ""],
    ],
    "flies a kite": [
        [
            "One windy day, {N} took {his} {c} kite to {P}.",
            "{N} had a new {c} kite. One day, the wind was strong.",
        ],
        ["The kite went up, up, up into the sky.", "{He} ran, and the kite flew high."],
        [
            "Then the wind took it away. It got stuck in a tall tree.",
            "But the string broke, and the kite landed in a tree.",
        ],
        [
            "{N} could not reach it. {He} was too small.",
            "{N} jumped and jumped, but the tree was too tall.",
        ],
        ['"My kite!" {he} cried.', "{N} sat down and felt sad."],
        [
            '{F} the {f} saw the kite. "I can climb," {fhe} said.',
            '"I will get it for you," said {F} the {f}.',
        ],
        [
            "{F} climbed up very slowly. {N} held {his} breath.",
            "{F} went up, one branch at a time.",
        ],
        ["Soon {fhe} came down with the kite.", "{F} pulled it out and dropped it down to {N}."],
        ['"You are so brave!" said {N}.', '"Thank you! Do you want to fly it with me?" asked {N}.'],
        [
            "They flew the kite together until evening.",
            "First {N} held the string, and then {F} did.",
        ],
    ],
}


def _words(idea: Idea, friend: Idea, rng: random.Random) -> dict[str, str]:
    """The words that fill the gaps of the grammar's sentences."""
    she, fshe = idea.pronoun == "She", friend.pronoun == "She"
    skill = rng.choice(list(SKILLS))
    thing = rng.choice([o for o in OBJECTS if o not in ("honey", "soup", "shoe")])
    a_f = a(f"{rng.choice(ADJECTIVES)} {friend.noun}")
    return {
        "hero": idea.hero, "N": idea.name, "n": idea.noun, "P": rng.choice(PLOT_PLACES),
        "He": "She" if she else "He", "he": "she" if she else "he",
        "His": "Her" if she else "His", "his": "her" if she else "his",
        "him": "her" if she else "him",
        "F": friend.name, "f": friend.noun, "a_f": a_f, "A_f": a_f[0].upper() + a_f[1:],
        "fhe": "she" if fshe else "he", "fhim": "her" if fshe else "him",
        "FHis": "Her" if fshe else "His",
        "o": thing, "ao": a(thing), "c": rng.choice(COLORS), "w": rng.choice(WEATHER),
        "food": rng.choice(FOODS), "like": rng.choice(LIKES).replace("a {o}", a(thing)),
        "skill": skill, "doing": SKILLS[skill][0], "where": SKILLS[skill][1],
    }  # fmt: skip


def compose(count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield ``count`` different stories from the grammar, each with a fitting request."""
    seen: set[str] = set()
    while len(seen) < count:
        idea, friend = draw_idea(rng), draw_idea(rng)
        if idea.name == friend.name or idea.noun == friend.noun:
            continue
        words = _words(idea, friend, rng)
        topic = rng.choice(list(PLOTS))
        beats = [rng.choice(beat).format(**words) for beat in PLOTS[topic]]
        if rng.random() < 0.3:  # a second plot, with another friend and another thing
            other = draw_idea(rng)
            if other.name in (idea.name, friend.name) or other.noun in (idea.noun, friend.noun):
                continue
            more = PLOTS[rng.choice([p for p in PLOTS if p not in (topic, "wants a friend")])]
            second = _words(idea, other, rng)
            follow = [rng.choice(beat).format(**second) for beat in more]
            follow[0] = re.sub(r"^One (day|morning|night),", r"The next \1,", follow[0])
            beats += [f"\n\n{follow[0]}", *follow[1:]]
        begin = [rng.choice(INTRO).format(**words), rng.choice(LIKE).format(**words)]
        parts = [p for p in (*begin, *beats, rng.choice(ENDING).format(**words)) if p]
        # paragraphs: the beginning, the middle, the end
        cuts = {2 + rng.randrange(2), len(parts) - 2 - rng.randrange(3)}
        if rng.random() < 0.3:
            cuts = set()
        text = parts[0]
        for i, part in enumerate(parts[1:], 1):
            text += ("\n\n" if i in cuts else " ") + part
        story = re.sub(r"\s*\n\n\s*", "\n\n", text)
        if story in seen:
            continue
        seen.add(story)
        topic = topic.format(**words)
        asks = [f"about {idea.hero}", f"about {a(idea.noun)}", f"about {idea.name} the {idea.noun}"]
        asks += [f"about {idea.hero} named {idea.name}", f"about {idea.hero} and {words['a_f']}"]
        asks += [f"about {a(idea.noun)} and {a(friend.noun)}"]
        asks += [f"about {a(idea.noun)} who {topic}", f"about {idea.hero} who {topic}"]
        start = rng.choice(("Write a story", "Tell me a story", "Write a short story",
                            "Please tell me a story", "Can you write a story"))  # fmt: skip
        ask = f"{start} {rng.choice(asks)}" if rng.random() < 0.92 else "Tell me a story"
        yield {"request": ask + ("?" if ask.startswith("Can") else "."), "story": story}


# ----------------------------------------------------------------------------------------------
# Sampling
# ----------------------------------------------------------------------------------------------


class Sampler:
    """A Llama forward pass for batches whose rows all have the same length."""

    def __init__(self, folder: Path, device: str) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        self.device, self.dtype = device, torch.bfloat16
        torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for every length: 2.6x slower
        state = load_file(folder / "model.safetensors")
        state = {k: v.to(device, self.dtype) for k, v in state.items()}
        self.embed = state["model.embed_tokens.weight"]
        self.norm = state["model.norm.weight"]
        self.layers = []
        for i in range(self.config.num_hidden_layers):
            w = {k: state[f"model.layers.{i}.{k}.weight"] for k in self._layer_keys()}
            qkv = torch.cat([w[f"self_attn.{x}_proj"] for x in "qkv"])
            gate_up = torch.cat([w["mlp.gate_proj"], w["mlp.up_proj"]])
            self.layers.append(
                (
                    w["input_layernorm"],
                    qkv,
                    w["self_attn.o_proj"],
                    w["post_attention_layernorm"],
                    gate_up,
                    w["mlp.down_proj"],
                )
            )
        dim = self.config.head_dim
        theta = self.config.rope_parameters["rope_theta"]
        freq = theta ** (-torch.arange(0, dim, 2, device=device).float() / dim)
        angle = torch.arange(2048, device=device).float()[:, None] * freq
        self.cos, self.sin = angle.cos()[:, None], angle.sin()[:, None]  # [position, 1, dim / 2]
        self.cache: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # per layer k, v: [row, t, head, d]

    @staticmethod
    def _layer_keys() -> list[str]:
        attention = [f"self_attn.{x}_proj" for x in "qkvo"]
        mlp = [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        return ["input_layernorm", "post_attention_layernorm", *attention, *mlp]

    def start(self, rows: int, length: int) -> None:
        """Set aside the cache for a new batch."""
        shape = (rows, length, self.config.num_key_value_heads, self.config.head_dim)
        self.cache = []
        for _ in self.layers:
            k = torch.empty(shape, device=self.device, dtype=self.dtype)
            self.cache.append((k, torch.empty_like(k)))

    def keep(self, rows: torch.Tensor) -> None:
        """Drop the cache of the rows that have ended."""
        for i, (k, v) in enumerate(self.cache):
            self.cache[i] = (k[rows], v[rows])

    def forward(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """tokens [rows, T] at positions start..start+T-1 -> logits [rows, vocabulary] of the last.

        T > 1 only with start == 0 (the prompt); after that one token at a time.
        """
        rows, length = tokens.shape
        end = start + length
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        dim, eps = self.config.head_dim, self.config.rms_norm_eps
        cos, sin = self.cos[start:end], self.sin[start:end]
        x = F.embedding(tokens, self.embed)
        for (norm1, qkv, out, norm2, gate_up, down), (keys, values) in zip(
            self.layers, self.cache, strict=True
        ):
            y = F.rms_norm(x, (x.shape[-1],), norm1, eps) @ qkv.T
            y = y.view(rows, length, heads + 2 * kv_heads, dim)
            left, right = y[:, :, : heads + kv_heads].float().chunk(2, dim=-1)
            qk = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
            q, k = qk.to(self.dtype).split([heads, kv_heads], dim=2)
            keys[:, start:end] = k
            values[:, start:end] = y[:, :, heads + kv_heads :]
            k, v = keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)
            if length > 1:
                q = q.transpose(1, 2)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                y = y.transpose(1, 2)
            else:  # the query heads that share a key head become its "positions": nothing repeated
                q = q.reshape(rows, kv_heads, heads // kv_heads, dim)
                y = F.scaled_dot_product_attention(q, k, v)
            x = x + y.reshape(rows, length, heads * dim) @ out.T
            gate, up = (F.rms_norm(x, (x.shape[-1],), norm2, eps) @ gate_up.T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ down.T
        return F.rms_norm(x[:, -1], (x.shape[-1],), self.norm, eps) @ self.embed.T

    @torch.inference_mode()
    def sample(
        self,
        prompts: torch.Tensor,
        new_tokens: int,
        temperature: float,
        min_p: float,
        penalty: float,
    ) -> list[list[int]]:
        """Sample a continuation of each prompt; a row ends with <|im_end|> or <|endoftext|>.

        min-p (drop tokens less likely than min_p times the likeliest) is used rather than top-p:
        it needs no sort over the 49,152 tokens.  The model is small and fond of saying things
        again and again, so a token that would repeat a sequence of four loses ``penalty`` for
        each earlier occurrence (twice at most: a long name must still get through).
        """
        rows, length = prompts.shape
        self.start(rows, length + new_tokens)
        output = torch.zeros(rows, new_tokens, dtype=torch.int32, device=self.device)
        index = torch.arange(rows, device=self.device)  # which output row each live row is
        history = torch.zeros(rows, new_tokens, dtype=torch.long, device=self.device)
        done = torch.zeros(rows, dtype=torch.bool, device=self.device)
        logits = self.forward(prompts, 0)
        for t in range(new_tokens):
            logits = logits.float()
            if t > 3:
                last = history[:, t - 3 : t, None]
                same = history[:, : t - 3] == last[:, 0]
                same &= history[:, 1 : t - 2] == last[:, 1]
                same &= history[:, 2 : t - 1] == last[:, 2]
                loss = torch.zeros_like(logits)
                loss.scatter_add_(1, history[:, 3:t], same * penalty)
                logits -= loss.clamp_(max=2 * penalty)
            p = torch.softmax(logits / temperature, dim=-1)
            p = p.masked_fill_(p < min_p * p.amax(-1, keepdim=True), 0.0)
            # argmax(p / exponential noise) is a draw from p
            token = (p / torch.empty_like(p).exponential_()).argmax(-1)
            token = token.masked_fill(done, 2)
            done |= token <= 2
            output[index, t] = token.int()
            history[:, t] = token
            if t % 16 == 15:
                live = (~done).nonzero().squeeze(1)
                if len(live) == 0:
                    break
                if len(live) < 0.85 * len(done):
                    self.keep(live)
                    index, token, done = index[live], token[live], done[live]
                    history = history[live]
            logits = self.forward(token[:, None], length + t)
        return output.tolist()


# ----------------------------------------------------------------------------------------------
# Cleaning
# ----------------------------------------------------------------------------------------------

PLAIN = set(
    "that with they there their them from what when were have this said would could".split()
)
REPLACE = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "-"})
BAD = re.compile(
    r"[^\x20-\x7e\n]|[*#_{}<>\[\]|\\/=+^~`@&%$()]|\d{2,}|http|language model|\bAI\b|SmolLM|"
    r"\bI'm (sorry|unable)|Sure[,!]|[Hh]ere('s| is) (a|the|your) (very |short |simple )*story|"
    r"[Tt]he story (is|has|takes)|[Tt]his story|[Mm]oral of|4.year.old|four.year.old|"
    r"[Ss]hort story|[Tt]itle:|Title|[Tt]he end|THE END|\b[A-Z]{3,}\b|:\s|;"
)


def clean(text: str, finished: bool, min_pairs: float) -> str | None:
    """Return the story in a tidy form, or None if it should not be learnt from."""
    text = text.translate(REPLACE).replace("\u2026", "...").strip()
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"\s*\n\s*", "\n\n", text)
    text = re.sub(r"\s*(The End|THE END|The end)[.!]*\s*$", "", text)
    if not finished:  # cut at the token limit: go back to the last full sentence
        cut = max(text.rfind(end) for end in (". ", "! ", "? ", '." ', '!" ', '?" ', ".\n", '"\n'))
        text = text[: cut + 1].rstrip() if cut > 0 else ""
        if text.count('"') % 2:  # the cut left a quotation open
            text += '"' if text[-1] in ".!?" else ""
    if not 250 <= len(text) <= 1800 or text[-1] not in '.!?"' or BAD.search(text):
        return None
    if text.count('"') % 2:
        return None
    sentences = [s.strip() for s in re.split(r'(?<=[.!?"])\s+', text)]
    if len(set(sentences)) < 0.95 * len(sentences) or len(sentences) < 5:
        return None
    words = re.findall(r"[a-z']+", text.lower())
    if not 4 < len(words) / len(sentences) < 22:
        return None
    # What remains is mostly fluent; the common fault is going round in circles.  So: few repeated
    # word pairs, no word that crowds out the others, no list of sentences with one beginning.
    if len(set(pairwise(words))) < min_pairs * len(words):
        return None
    common = Counter(w for w in words if len(w) > 3 and w not in PLAIN)
    if common and common.most_common(1)[0][1] > max(4, 0.065 * len(words)):
        return None
    starts = Counter(" ".join(s.split()[:3]) for s in sentences)
    if starts.most_common(1)[0][1] > 3:
        return None
    return text


def select(story: str) -> str | None:
    """A second, stricter choice for training: the beginning of the more varied stories only.

    These stories lose their thread as they go on, so only whole paragraphs up to about 700
    characters are taken.  Stories that repeat themselves, or dwell on the writer's pet words, are
    left out: a small model imitates such faults first of all.
    """
    taken: list[str] = []
    for paragraph in story.split("\n\n"):
        if taken and sum(map(len, taken)) + len(paragraph) > 700:
            break
        taken.append(paragraph)
    text = "\n\n".join(taken)
    words = re.findall(r"[a-z']+", text.lower())
    pairs = len(set(pairwise(words))) / len(words)
    pet = sum(w in ("special", "proud", "magical", "loved", "helped", "helping") for w in words)
    common = Counter(w for w in words if len(w) > 3 and w not in PLAIN).most_common(1)
    if not 250 <= len(text) <= 900 or pairs < 0.865 or pet > 2 or common[0][1] > 0.05 * len(words):
        return None
    return text if text.count('"') % 2 == 0 else None


def batches(
    tokenizer: AutoTokenizer, rows: int, rng: random.Random
) -> Iterator[tuple[list[Idea], torch.Tensor]]:
    """Yield batches of prompts of one common length, for ever."""
    groups: dict[int, list[tuple[Idea, list[int]]]] = defaultdict(list)
    while True:
        ideas = [draw_idea(rng) for _ in range(8192)]
        texts = [
            f"<|im_start|>user\n{request(idea, rng)}<|im_end|>\n"
            f"<|im_start|>assistant\n{idea.opening}"
            for idea in ideas
        ]
        for idea, ids in zip(ideas, tokenizer(texts)["input_ids"], strict=True):
            group = groups[len(ids)]
            group.append((idea, ids))
            if len(group) == rows:
                yield [i for i, _ in group], torch.tensor([ids for _, ids in group])
                group.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2 checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for stories.jsonl.gz")
    parser.add_argument("--rows", type=int, default=4096, help="rows sampled together")
    parser.add_argument("--seconds", type=float, default=240, help="start no batch after this")
    parser.add_argument("--new-tokens", type=int, default=240)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--min-p", type=float, default=0.1)
    parser.add_argument("--penalty", type=float, default=2.0, help="for repeated 4-grams")
    parser.add_argument("--min-pairs", type=float, default=0.77, help="see clean()")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=int, default=40000, help="stories a file")
    parser.add_argument("--show", type=int, default=3, help="stories to print")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sampler = Sampler(args.model, device)

    begin = time.time()
    sampled = tried = 0
    seen: set[str] = set()
    lines: list[str] = []
    for ideas, prompts in batches(tokenizer, args.rows, rng):
        tick = time.time()
        output = sampler.sample(
            prompts.to(device), args.new_tokens, args.temperature, args.min_p, args.penalty
        )
        tock = time.time()
        ends = [next((i for i, t in enumerate(o) if t <= 2), len(o)) for o in output]
        texts = tokenizer.batch_decode([o[:e] for o, e in zip(output, ends, strict=True)])
        for idea, end, text in zip(ideas, ends, texts, strict=True):
            tried += 1
            sampled += end
            story = clean(idea.opening + text, end < args.new_tokens, args.min_pairs)
            if story is None or story in seen:
                continue
            seen.add(story)
            row = {"request": embedded_request(idea, story, rng), "story": story}
            lines.append(json.dumps(row) + "\n")
            if len(seen) <= args.show:
                print(f"--- {row['request']}\n{story}\n", flush=True)
        print(
            f"{time.time() - begin:6.1f} s  batch of {len(ideas)} in {tock - tick:.1f} s  "
            f"{sampled:,} tokens sampled, {len(seen):,} of {tried:,} stories kept",
            flush=True,
        )
        if time.time() - begin > args.seconds:
            break
    for shard in range(0, len(lines), args.shard):
        name = f"stories-{shard // args.shard}.jsonl.gz"
        with gzip.open(args.out / name, "wt", compresslevel=6) as file:
            file.writelines(lines[shard : shard + args.shard])


if __name__ == "__main__":
    main()
