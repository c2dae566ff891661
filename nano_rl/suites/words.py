"""The words that domains draw from: plain, lower-case ASCII where order may matter."""

from __future__ import annotations

import random

_NAMES = """
Ada Alan Amir Anna Arjun Bela Bruno Carla Chen Clara Dana David Diego Elena Emil Esra Fatima Felix Finn Grace
Hana Hugo Ida Igor Ines Ivan Jana Jonas Julia Kai Karim Kofi Lars Lena Leo Lin Luca Maja Marco Maria Milan
Mina Nadia Nils Nina Noor Olga Omar Oskar Paula Petra Priya Rosa Ruth Samir Sara Selma Sofia Sven Tara Tomas
Uma Vera Viktor Wanda Yara Yusuf Zoe
"""
NAMES = tuple(_NAMES.split())
_SURNAMES = """
Adler Baker Berger Costa Dahl Diaz Egger Farah Fischer Garcia Haddad Hansen Ito Jensen Kaya Keller Kovacs
Lang Lopez Meyer Moreau Nagy Novak Okafor Olsen Park Patel Quinn Ricci Rossi Sato Schmid Silva Tanaka Vogel
Weber Yilmaz Zeman
"""
SURNAMES = tuple(_SURNAMES.split())
_WORDS = """
amber anchor apple arrow autumn basket beacon birch blanket bottle branch bridge bronze bucket butter cabin
candle canvas carpet castle cedar chalk cherry circle clover copper coral cotton crystal daisy desert diamond
ember engine fabric falcon feather fennel fern flame flower forest fossil garden ginger glacier grain granite
hammer harbor hazel helmet honey island ivory jacket jasmine jungle kettle ladder lantern laurel leather lemon
lilac linen magnet maple marble meadow mirror mortar needle nettle oasis olive orchard oyster paddle paper
pebble pepper pigeon pillow planet pocket quartz rabbit raven ribbon river rocket saddle saffron sail salmon
shadow silver spruce summit sunset tablet thistle thunder timber tulip tunnel velvet violet walnut willow
window winter yarrow zephyr
"""
WORDS = tuple(_WORDS.split())
_CITIES = """
Athens Basel Bergen Bilbao Bogota Cairo Cork Dakar Delhi Dresden Florence Geneva Ghent Graz Hanoi Izmir Kyoto
Lagos Leeds Lima Lisbon Lyon Malmo Nantes Naples Osaka Oslo Porto Quito Riga Seoul Sofia Tallinn Tunis Turin
Utrecht Vienna Vilnius Zagreb Zurich
"""
CITIES = tuple(_CITIES.split())
TEAMS = ("design", "finance", "legal", "marketing", "operations", "research", "sales", "support")
COLORS = ("black", "blue", "brown", "green", "grey", "orange", "purple", "red", "white", "yellow")


def person(rng: random.Random) -> str:
    """First name and surname."""
    return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"


def people(rng: random.Random, n: int) -> list[str]:
    """`n` people no two of whom share a first name."""
    return [f"{name} {rng.choice(SURNAMES)}" for name in rng.sample(NAMES, n)]


def day(rng: random.Random) -> str:
    """A day as YYYY-MM-DD."""
    return f"{rng.randint(2027, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def hour(rng: random.Random) -> str:
    """A time of the working day as HH:MM."""
    return f"{rng.randint(8, 17):02d}:{rng.choice(('00', '15', '30', '45'))}"
