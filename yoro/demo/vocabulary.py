"""The words that the demo's questions are made of.

Knows no question and no grader. Invariants: no list has a word twice; capitals are one word.
"""


def _list(text: str) -> list[str]:
    return text.split()


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(first, second) for first, _, second in (pair.partition("-") for pair in text.split(" "))]


NOUNS = _list(
    "apple river stone candle garden window bottle mirror ladder basket hammer pillow blanket carpet table "
    "chair lamp clock door wall roof bridge tower castle village city street market harbour island mountain "
    "valley forest desert beach lake cloud storm rain wind flame shadow star planet rocket engine wheel "
    "train boat ship plane truck wagon horse tiger rabbit monkey eagle spider turtle dolphin lion zebra "
    "camel goat duck owl bee ant fox box brush dish watch bench peach church witch dress glass bus child "
    "man woman tooth foot mouse goose knife leaf wolf shelf berry cherry party baby puppy story lady key "
    "toy boy day book pencil paper letter school teacher doctor farmer baker singer painter dancer pilot "
    "king queen prince soldier friend neighbour song drum piano violin guitar camera phone screen button "
    "pocket jacket shirt scarf glove boot hat ring coin purse ticket map flag kite"
)
IRREGULAR = {
    "child": "children",
    "man": "men",
    "woman": "women",
    "tooth": "teeth",
    "foot": "feet",
    "mouse": "mice",
    "goose": "geese",
    "knife": "knives",
    "leaf": "leaves",
    "wolf": "wolves",
    "shelf": "shelves",
    "scarf": "scarves",
}

OPPOSITES = _pairs(
    "hot-cold big-small tall-short fast-slow old-young happy-sad rich-poor strong-weak light-dark wet-dry "
    "hard-soft early-late open-closed full-empty heavy-light good-bad up-down left-right in-out day-night "
    "black-white high-low near-far loud-quiet clean-dirty thick-thin wide-narrow deep-shallow true-false "
    "first-last win-lose push-pull love-hate buy-sell give-take start-stop come-go laugh-cry north-south "
    "east-west always-never before-after more-less brave-cowardly rough-smooth sharp-blunt safe-dangerous"
)
CAPITALS = _pairs(
    "France-Paris Germany-Berlin Italy-Rome Spain-Madrid Portugal-Lisbon Austria-Vienna Greece-Athens "
    "Poland-Warsaw Hungary-Budapest Ireland-Dublin England-London Scotland-Edinburgh Norway-Oslo "
    "Sweden-Stockholm Finland-Helsinki Denmark-Copenhagen Belgium-Brussels Netherlands-Amsterdam "
    "Switzerland-Bern Russia-Moscow Ukraine-Kyiv Turkey-Ankara Romania-Bucharest Bulgaria-Sofia "
    "Serbia-Belgrade Croatia-Zagreb Japan-Tokyo China-Beijing India-Delhi Thailand-Bangkok Vietnam-Hanoi "
    "Indonesia-Jakarta Philippines-Manila Iran-Tehran Iraq-Baghdad Syria-Damascus Lebanon-Beirut "
    "Jordan-Amman Egypt-Cairo Libya-Tripoli Tunisia-Tunis Algeria-Algiers Morocco-Rabat Kenya-Nairobi "
    "Nigeria-Abuja Ghana-Accra Senegal-Dakar Cuba-Havana Canada-Ottawa Australia-Canberra Peru-Lima "
    "Chile-Santiago Ecuador-Quito Colombia-Bogota Venezuela-Caracas Uruguay-Montevideo Iceland-Reykjavik"
)
KINDS = {
    "an animal": _list("horse tiger rabbit monkey eagle spider turtle dolphin zebra camel goat duck wolf"),
    "a fruit": _list("apple banana cherry grape lemon mango orange peach pear plum melon"),
    "a colour": _list("red blue green yellow purple pink brown white black grey"),
    "a vehicle": _list("car bus train truck bicycle boat ship tram taxi wagon"),
    "a tool": _list("hammer saw drill wrench screwdriver shovel axe rake pliers"),
    "a country": _list("France Japan Brazil Kenya Canada Norway India Egypt Peru Greece"),
    "an instrument": _list("piano violin guitar drum flute trumpet harp cello"),
}
PRAISE = _list("wonderful excellent delightful brilliant fantastic superb lovely perfect amazing great")
BLAME = _list("terrible awful disappointing boring horrible dreadful useless broken ugly bad")
REVIEWED = _list("film hotel soup concert phone book teacher garden museum meal service room")
BOUGHT = _list("guitar piano lamp clock jacket ticket camera mirror kite bicycle carpet violin watch map")
PEOPLE = _list("Anna Ben Carla David Emma Felix Grace Henry Ida Jonas")
