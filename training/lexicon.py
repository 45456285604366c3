"""Words the stories draw on: names, animals, places, things, and phrases shared by many plots.

Knows no plot. Everything is a constant tuple or mapping; nothing here is random.
"""

from collections.abc import Mapping
from types import MappingProxyType


def words(text: str) -> tuple[str, ...]:
    """Split a line of words."""
    return tuple(text.split())


def items(text: str) -> tuple[str, ...]:
    """Split a line of phrases at commas."""
    return tuple(part.strip() for part in text.split(","))


GIRLS = words(
    "Mia Anna Lucy Ella Rosa Nina Clara Ruby Ivy Zoe Maya Lena Nora Emma Alice Hana Tara Lily Daisy Amy Kate Pia"
    " Sofia Wendy Jane Mary Eva Iris Olive Grace Leah Ada Beth Dora Fay Asha Amina Carla Chloe Elsa Freya Gita"
    " Heidi Ines Jade Kiri Laila Mona Nadia Petra Priya Rita Sara Selma Sita Tessa Uma Vera Willa Yara Zara"
)
BOYS = words(
    "Tom Ben Sam Max Leo Jack Omar Finn Hugo Theo Noah Adam Luke Oscar Peter Tim Joe Kofi Ravi Ali Jonas Paul Eli"
    " Ned Otto Bob Carl Dan Felix Gus Ian Kai Milo Nick Rob Anton Arun Bruno Cyrus David Emil Frank George Henry"
    " Idris Jamal Karl Lars Marco Nico Olaf Pedro Quinn Rafi Simon Tariq Umar Victor Walter Yusuf Zack Toby"
)
PET_NAMES = words(
    "Pip Dot Bramble Hazel Nutty Fern Rusty Pebble Cloud Biscuit Pepper Ginger Acorn Bean Button Clover Daffy"
    " Fuzzy Honey Jolly Lucky Mossy Poppy Scout Sunny Tiny Toffee Waffle Willow Ziggy Barley Berry Bubbles"
    " Cricket Copper Dusty Feather Flick Freckle Hopper Juniper Maple Marble Minty Muffin Nibbles Oatmeal Patch"
    " Pickle Puddle Pumpkin Ripple Shadow Smudge Snowy Speckle Spot Thistle Twig Velvet Whisker"
)
# kind: home / sound it makes / favourite food
ANIMALS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "rabbit": ("burrow", "a soft thump", "carrots"),
        "fox": ("den", "a bark", "berries"),
        "bear": ("cave", "a growl", "honey"),
        "owl": ("hollow tree", "a hoot", "seeds"),
        "mouse": ("hole", "a squeak", "cheese"),
        "duck": ("pond", "a quack", "bread"),
        "frog": ("pond", "a croak", "flies"),
        "squirrel": ("tall tree", "a chatter", "nuts"),
        "turtle": ("river bank", "a hiss", "leaves"),
        "hedgehog": ("pile of leaves", "a sniff", "apples"),
        "kitten": ("basket", "a meow", "fish"),
        "puppy": ("little house", "a woof", "bones"),
        "piglet": ("barn", "an oink", "corn"),
        "goat": ("hill", "a bleat", "grass"),
        "hen": ("coop", "a cluck", "corn"),
        "monkey": ("jungle", "a screech", "bananas"),
        "penguin": ("snow house", "a honk", "fish"),
        "otter": ("river", "a whistle", "fish"),
        "mole": ("tunnel", "a snuffle", "roots"),
        "deer": ("forest", "a snort", "grass"),
        "crow": ("nest", "a caw", "seeds"),
        "beaver": ("dam", "a splash", "bark"),
        "lamb": ("meadow", "a baa", "clover"),
        "badger": ("burrow", "a grunt", "mushrooms"),
        "raccoon": ("hollow log", "a chitter", "corn"),
        "sparrow": ("nest", "a chirp", "crumbs"),
        "elephant": ("green valley", "a trumpet", "grass"),
        "lion": ("rocky hill", "a roar", "stew"),
        "donkey": ("stable", "a bray", "hay"),
        "pony": ("stable", "a neigh", "oats"),
        "goose": ("lake", "a honk", "grass"),
        "snail": ("flower pot", "no sound at all", "lettuce"),
        "cat": ("warm kitchen", "a meow", "fish"),
        "dog": ("farm house", "a bark", "bones"),
    }
)
# place: how one is there / five spots in it
PLACES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "park": (
            "in the park",
            items(
                "under the slide, behind a bench, in the sandbox, near the swings, under a big oak tree"
            ),
        ),
        "garden": (
            "in the garden",
            items(
                "under a bush, behind the shed, between the roses, in the flower bed, next to the gate"
            ),
        ),
        "beach": (
            "at the beach",
            items(
                "behind a rock, under a towel, in a hole in the sand, near a sand castle, beside a little pool"
            ),
        ),
        "forest": (
            "in the forest",
            items(
                "under a fern, inside a hollow log, behind a mossy stone, in a pile of leaves, by the stream"
            ),
        ),
        "farm": (
            "on the farm",
            items(
                "in the barn, under a haystack, behind the tractor, near the pond, beside the fence"
            ),
        ),
        "school": (
            "at school",
            items(
                "under a desk, behind the door, in the reading corner, on a high shelf, in a box of crayons"
            ),
        ),
        "house": (
            "in the house",
            items(
                "under the bed, behind the sofa, in a kitchen drawer, on top of the cupboard, in the laundry basket"
            ),
        ),
        "market": (
            "at the market",
            items(
                "under a table, behind a cart, next to the flower stand, in a paper bag, beside a barrel"
            ),
        ),
        "library": (
            "in the library",
            items(
                "between two books, under the stairs, behind a shelf, on the window sill, next to the globe"
            ),
        ),
        "meadow": (
            "in the meadow",
            items(
                "in the tall grass, behind a stump, under a wild rose, near the old wall, beside a puddle"
            ),
        ),
        "harbor": (
            "at the harbor",
            items(
                "behind a net, under a boat, inside a coil of rope, on a wet step, beside a crate"
            ),
        ),
        "attic": (
            "in the attic",
            items(
                "in a dusty trunk, behind a mirror, under a blanket, inside an old hat, near the little window"
            ),
        ),
        "village": (
            "in the village",
            items(
                "behind the well, under a cart, beside the bakery, on the church steps, near the fountain"
            ),
        ),
    }
)
COLORS = words(
    "red blue green yellow orange purple pink white black brown silver golden gray striped spotted"
)
TOYS = words(
    "ball kite doll drum boat train truck puzzle robot yo-yo top scarf hat book basket bell lantern whistle bucket"
    " umbrella ribbon marble flute mitten button pencil blanket wagon balloon key"
)
WEATHER = words(
    "sunny windy cloudy warm cool bright foggy quiet rainy frosty fine lovely gray mild"
)
TRAITS = words(
    "kind brave shy curious funny careful cheerful gentle clever stubborn sleepy busy quiet polite lively dreamy"
    " patient proud hungry honest playful thoughtful messy friendly"
)
FOODS = items(
    "apple pie, honey cake, carrot soup, warm bread, pancakes, oat cookies, fruit salad, porridge, berry jam,"
    " noodles, cheese, roasted nuts, corn bread, plums, pumpkin soup, rice, cherries, buttered toast"
)
NUMBERS = words("two three four five six seven eight nine ten")
HELPERS: Mapping[str, str] = MappingProxyType(
    {
        "mother": "she",
        "father": "he",
        "grandmother": "she",
        "grandfather": "he",
        "uncle": "he",
        "aunt": "she",
        "big sister": "she",
        "big brother": "he",
    }
)
LIVED = items(
    "by the sea, near a wide river, at the foot of a green hill, next to the old mill, beside a dark wood,"
    " at the edge of town, on a small farm, in a house with a red roof, near a quiet lake, at the end of a long road,"
    " in a narrow street, on an island, in a valley full of flowers, under a tall mountain"
)

LIKES = items(
    "jumping over puddles, the smell of fresh bread, long walks, funny hats, old maps, singing in the bath, warm socks,"
    " collecting stones, the sound of rain, making soup, drawing ships, climbing trees, counting stars, riddles, picnics,"
    " dancing in the kitchen, feeding the birds, reading by candle light, building towers, rolling down hills, parades,"
    " strawberry jam, whistling tunes, sleeping late, telling jokes, playing chess, catching snowflakes, painting fences,"
    " digging holes, watching trains, planting flowers, baking cookies, looking at clouds, swimming in the lake, fireflies,"
    " hide and seek, the color {col}, sitting by the fire, wild strawberries, market days, skipping stones, bedtime stories,"
    " sea shells, marching bands, roasted chestnuts, knitting scarves, puppet plays, horses, thunder and lightning, tea parties"
)
DETAILS = (
    "{heF:c} liked {like}.",
    "{NF} loved {like}.",
    "More than anything, {heF} liked {like}.",
    "{heF:c} was known for {hisF} love of {like}.",
    "{NF} was {TF}, and {heF} liked {like}.",
    "Everyone knew that {NF} liked {like}.",
    "{heF:c} had {eyes} and liked {like}.",
    "{NF} often wore {col:a} [hat|scarf|ribbon] and liked {like}.",
)
EYES = items(
    "bright eyes, a big smile, a small nose, quick feet, a soft voice, a loud laugh, big ears, gentle eyes, a busy mind"
)

MACROS: Mapping[str, str] = MappingProxyType(
    {
        "open": "[Once upon a time, there was {who:a} named {NF}.|There once was {who:a} called {NF}."
        "|{NF} was {who:a}.|Long ago, {who:a} named {NF} lived {lived}.|{NF} was {who:a} who lived {lived}."
        "|In a [small|quiet|busy|little] [town|village] lived {who:a} named {NF}.|This is the story of {NF}, {who:a}."
        "|Once, {lived}, there lived {who:a} called {NF}.|Once upon a time, {who:a} named {NF} lived {lived}."
        "|A long time ago, there was {who:a}. {hisF:c} name was {NF}.]",
        "who": "[{TF} [little|young|small|] {KF}|[little|young|small] {KF}|{TF} {KF}|little {KF}]",
        "day": "[One {W} [morning|afternoon|day]|On a {W} [morning|afternoon|day]|One day|Early one {W} morning"
        "|After [lunch|breakfast]|One {W} evening|Last [spring|summer|autumn|winter]|The next [morning|day]]",
        "soon": "[Soon|After a while|Before long|A little later|In no time]",
        "atlast": "[At last|Finally|In the end|After a long time|When nobody expected it]",
        "then": "[Then|Just then|At that moment|A moment later|All at once|Suddenly]",
        "ohno": "[Oh no|Oh dear|Oh my|Goodness|Dear me]",
        "hooray": "[Hooray|Hurrah|Yes|Wonderful|Look]",
        "cried": "[cried|said|called|shouted]",
        "said": "[said|said|answered|replied]",
        "asked": "[asked|asked|said|wondered]",
        "happyF": "[{NF} was so happy that {heF} jumped up and down|{NF} laughed with joy|{NF} smiled from ear to ear"
        "|{NF} danced around in a circle|{NF} could not stop smiling|{NF} felt warm inside]",
        "sadF": "[{NF} felt very sad|{NF} hung {hisF} head|{NF} had tears in {hisF} eyes|{NF} sighed a long sigh"
        "|{NF} did not know what to do]",
        "thanks": "[Thank you|Thank you so much|Thank you very much|Thanks, {NG}|How kind of you|You are a good friend]",
        "comfort": "[Do not worry|Do not cry|Cheer up|Never mind|It will be all right|Dry your tears]",
        "thought": "[thought and thought|sat down to think|scratched {hisF} head|thought for a long time|had an idea]",
        "worked": "[It was hard work, but they did not stop|They worked all morning|They worked side by side"
        "|They helped each other|Nobody rested until it was done]",
        "friends": "[From that day on, {NF} and {NG} were best friends|{NF} and {NG} stayed friends for ever"
        "|After that, {NF} and {NG} did everything together|{NF} and {NG} went home side by side"
        "|And so {NF} and {NG} became good friends]",
        "endday": "[Then it was time to go home|The sun went down behind the hills|Soon the stars came out"
        "|That night {NF} slept well|{NF} fell asleep with a smile|Everyone went home happy|It was a day to remember"
        "|At bedtime {NF} thought about it again and smiled]",
        "quietly": "[quietly|softly|in a small voice|very slowly|with a shy smile]",
        "loudly": "[loudly|with a big voice|as loud as {heF} could|happily]",
        "bignote": "[It was the best day of the year|It was the nicest thing of all|Nothing had ever felt so good|]",
        "many": "[many|a lot of|a great many]",
    }
)
