"""Small facts and set phrases the chat generator asks about. Constants only."""

from types import MappingProxyType

from training.lexicon import items, words


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """'big small, hot cold' -> (('big', 'small'), ('hot', 'cold'))."""
    return tuple((left, right) for left, right in (part.split(" ", 1) for part in items(text)))


OPPOSITES = pairs(
    "big small, hot cold, up down, fast slow, happy sad, day night, open closed, hard soft, light dark, old new, long short,"
    " wet dry, full empty, high low, near far, loud quiet, clean dirty, left right, first last, early late, rich poor,"
    " strong weak, thick thin, wide narrow, good bad, awake asleep, inside outside, true false, always never, begin end,"
    " push pull, give take, brave afraid, sweet sour"
)
BABIES = pairs(
    "cat kitten, dog puppy, cow calf, sheep lamb, duck duckling, horse foal, bear cub, frog tadpole, goat kid, hen chick,"
    " pig piglet, deer fawn, swan cygnet, lion cub, goose gosling, kangaroo joey, owl owlet, fox cub, wolf pup, seal pup"
)
SOUNDS = pairs(
    "cow moo, dog woof, cat meow, duck quack, sheep baa, pig oink, owl hoot, bee buzz, crow caw, hen cluck, mouse squeak,"
    " frog croak, horse neigh, lion roar, bird tweet, snake hiss, donkey hee-haw, goose honk, turkey gobble, wolf howl"
)
CAPITALS = pairs(
    "France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Egypt Cairo, Kenya Nairobi, Peru Lima, Norway Oslo, Greece Athens,"
    " Cuba Havana, Canada Ottawa, Poland Warsaw, Austria Vienna, Ireland Dublin, Portugal Lisbon, China Beijing,"
    " Germany Berlin, India New Delhi, England London, Sweden Stockholm, Denmark Copenhagen, Turkey Ankara"
)
LEGS = pairs(
    "spider eight, dog four, bird two, bee six, cat four, ant six, horse four, duck two, snail no, snake no, cow four, fly six"
)
COLOR_OF = pairs(
    "grass green, snow white, coal black, blood red, milk white, gold yellow, chocolate brown, honey golden, charcoal black,"
    " chalk white, spinach green, butter yellow"
)
MEANINGS = MappingProxyType(
    {
        "a dog": "A dog is an animal that people keep as a pet.",
        "rain": "Rain is water that falls from clouds.",
        "the sun": "The sun is a star that gives us light and heat.",
        "a book": "A book is a set of pages with words or pictures.",
        "a river": "A river is water that flows over the land to the sea.",
        "snow": "Snow is frozen water that falls in soft white flakes.",
        "a teacher": "A teacher is a person who helps others learn.",
        "a tree": "A tree is a tall plant with a trunk, branches and leaves.",
        "a bridge": "A bridge is a way over a river or a road.",
        "music": "Music is sound made in a way that is nice to hear.",
        "a farm": "A farm is a place where food is grown and animals are kept.",
        "a clock": "A clock is a thing that tells the time.",
        "ice": "Ice is water that is frozen hard.",
        "a map": "A map is a picture that shows where places are.",
        "honey": "Honey is a sweet food that bees make.",
        "a volcano": "A volcano is a mountain that can throw out hot melted rock.",
        "the moon": "The moon is a big ball of rock that goes around the earth.",
        "a friend": "A friend is a person you like and trust.",
        "a baker": "A baker is a person who makes bread and cakes.",
        "a doctor": "A doctor is a person who helps sick people get well.",
        "an island": "An island is land with water all around it.",
        "a desert": "A desert is a dry place where little rain falls.",
        "the sea": "The sea is the salt water that covers much of the earth.",
        "a star": "A star is a huge ball of hot gas that shines in the sky.",
        "a library": "A library is a place where you can read and borrow books.",
        "bread": "Bread is a food made of flour and water and baked in an oven.",
        "a forest": "A forest is a place where many trees grow.",
        "a ship": "A ship is a big boat that sails on the sea.",
        "a wheel": "A wheel is a round thing that turns.",
        "a story": "A story tells what happened to somebody.",
        "wind": "Wind is air that moves.",
        "a promise": "A promise is when you say that you will surely do something.",
        "a rainbow": "A rainbow is an arch of colors in the sky when sun and rain meet.",
        "a garden": "A garden is a place where people grow flowers and vegetables.",
    }
)
GROUPS = MappingProxyType(
    {
        "fruit": words("apple banana pear grape orange plum peach cherry melon mango"),
        "animal": words("dog cat horse cow sheep lion tiger rabbit bear fox"),
        "color": words("red blue green yellow orange purple pink white black brown"),
        "vegetable": words("carrot potato onion pea bean corn tomato cabbage"),
        "tool": words("hammer saw drill spade brush knife"),
        "toy": words("ball doll kite drum train puzzle"),
        "bird": words("owl crow sparrow duck goose swan robin eagle"),
    }
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
SPELL = words(
    "cat dog sun moon tree book fish bird milk ball house water apple bread happy green friend school garden river mouse"
    " horse train table chair star snow rain door lamp"
)
COUNTABLE = words(
    "apple shell coin book cookie stone egg pencil ball card nut flower button star cup"
)
SMALL_TALK = (
    (
        "Hello!|Hi!|Hello there.|Hey!|Hi there!",
        "Hello! What would you like to talk about?|Hello! Would you like to hear a story?",
    ),
    (
        "Hi, how are you?|How are you?|How are you today?",
        "I am fine, thank you. How are you?|I am well, thank you. And you?",
    ),
    (
        "Who are you?|What are you?|Tell me about yourself.",
        "I am a very small language model. I can tell stories and do easy sums.|I am a tiny language model who likes stories.",
    ),
    (
        "What can you do?|How can you help me?|What are you good at?",
        "I can tell short stories, answer questions about them, and do small sums.",
    ),
    ("Thank you!|Thanks!|Thank you very much.", "You are welcome!"),
    ("Good night.|Good night!|I am going to bed.", "Good night! Sleep well."),
    ("What is your name?|Do you have a name?", "I do not have a name. I am a tiny language model."),
    (
        "Are you a person?|Are you human?|Are you a robot?",
        "No, I am not a person. I am a computer program.",
    ),
    (
        "Who will win the next election?|What is the meaning of life?|Who won the game yesterday?|What time is it?"
        "|What is the weather today?|Can you write a computer program?|What is the news today?|Translate this into French.",
        "I do not know. I am too small to know that.",
    ),
    ("Good morning!|Good morning.", "Good morning! Would you like to hear a story?"),
    ("Goodbye!|Bye!|See you later.", "Goodbye! Come back soon."),
    (
        "I am sad.|I feel sad today.|I had a bad day.",
        "I am sorry to hear that. Would you like to hear a happy story?",
    ),
    (
        "I am happy!|I had a good day.|Today is a good day.",
        "That is nice to hear! What made you happy?",
    ),
    (
        "Do you like stories?|Do you know any stories?",
        "Yes, I like stories very much. Shall I tell you one?",
    ),
    ("Can you do sums?|Can you do math?", "Yes, I can do small sums. Ask me one!"),
    ("Sorry.|I am sorry.", "That is all right."),
    ("You are funny.|You are nice.|I like you.", "Thank you! That is kind of you."),
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a kind storyteller.",
    "You are a tiny language model. Answer in simple words.",
    "Answer briefly.",
    "You help children with stories and sums.",
    "Be friendly and honest.",
)
