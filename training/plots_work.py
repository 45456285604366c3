"""Plots about work, trade and building. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

PLOTS = (
    Plot(
        "bridge",
        "working together",
        "xx",
        {
            "thing / part": (
                "a bridge / planks",
                "a tree house / boards",
                "a wall / stones",
                "a boat house / logs",
                "a bird house / nails",
                "a fence / posts",
            )
        },
        (
            '{heF:c} wanted to build {thing}. [{heF:c} had drawn it on paper.|{heF:c} had dreamed of it all winter.|"I will do it all'
            ' alone," {heF} said.]',
            "{day}, {NF} began. {heF:c} carried the {part} one by one. [But the {part} were heavy.|But everything fell down"
            " again.|But two hands were not enough.] By noon {heF} was [tired|hungry|angry], and there was nothing to see.",
            '{AG} came by. "[May I help you|That looks heavy|Two are stronger than one]," said {NG}. "[No, I want to do it'
            ' alone|No, thank you]," said {NF}. {NG} [shrugged|sat down|went away]. And crash! The {part} fell down once more.',
            '{NF} [sighed|began to laugh|wiped {hisF} face]. "[Will you help me after all|I was wrong, please help me|I cannot do it'
            ' alone]," {heF} said. {NG} held the {part}, and {NF} [hammered|tied them|put them in place]. {worked}.',
            'After {n} days there was {thing}. [It was strong and straight.|It was better than the drawing.|It stood in the sun.] "[I'
            ' built it|We built it]," said {NF}, and then {heF} looked at {NG}. "We built it together." They sat down and ate'
            " {food}.",
        ),
        (
            "What did {NF} build? {NF} built {thing}.",
            "Who helped {NF}? {AG} helped {NF}.",
            "How many days did it take? It took {n} days.",
            "What was heavy? The {part} were heavy.",
        ),
        "{NF} could not build {thing} alone, so {NG} helped.",
    ),
    Plot(
        "baker",
        "baking",
        "cx",
        {"ware": ("rolls", "buns", "pies", "cakes", "loaves", "cookies")},
        (
            "{heF:c} worked for the baker. [{heF:c} got up before the sun.|The bakery was warm and smelled of bread.|{hisF:c} apron was"
            " always white with flour.] Every morning {heF} carried {ware} to the houses.",
            '{day}, the baker was [ill|in bed with a cold|away]. "[Who will bake the {ware}|There will be no {ware} today|What shall we'
            ' do]?" the people asked. "[I will|I can try]," said {NF} {quietly}.',
            "{NF} had never baked alone. {heF:c} mixed [flour and water|butter and eggs|milk and sugar]. {heF:c} forgot the [salt|yeast"
            "|sugar]. The first {ware} were [flat as plates|hard as stones|black as coal]. {sadF}.",
            '{AG} looked in at the window. "[My grandmother always says to wait until the dough is round|Did you let the dough'
            ' rest|You forgot something]," said {NG}. "Let us try again." They [kneaded and rolled|sang while they waited|watched the'
            " oven together], and this time the {ware} came out [golden|soft|round and brown].",
            'The people [stood in a long line|came running|bought every one]. "[These are the best {ware} in town|How good they'
            ' smell|Two more, please]!" they said. When the baker was well, he gave {NF} {col:a} apron with {hisF} name on it.'
            " {happyF}.",
        ),
        (
            "Where did {NF} work? {NF} worked for the baker.",
            "What did {NF} bake? {NF} baked {ware}.",
            "What was wrong with the first {ware}? They were no good because {NF} forgot something.",
            "What did the baker give {NF}? The baker gave {NF} {col:a} apron.",
        ),
        "{NF} baked {ware} alone when the baker was away, and {NG} helped.",
    ),
    Plot(
        "three_coins",
        "spending wisely",
        "cx",
        {
            "b1": ("a whistle", "a toffee apple", "a paper hat", "a bag of sweets"),
            "b2": (
                "a hen",
                "a packet of seeds",
                "a needle and thread",
                "a fishing hook",
                "a small knife",
                "a pot of paint",
            ),
            "gain": (
                "There were eggs to sell",
                "There was always work",
                "The neighbors paid well",
                "Little by little it grew",
            ),
        },
        (
            '{hisF:c} {H} gave {himF} and {AG} three coins each. "[Use them well|Spend them wisely|Think before you buy]," said'
            " {hisF} {H}.",
            "At the market, {NG} bought {b1} [at once|right away|at the first stand]. {soon} it was [broken|gone|eaten or lost], and the"
            ' coins were gone too. "[What did you buy, {NF}|Show me what you bought]?" asked {NG}.',
            "{NF} [walked around the whole market|looked at everything twice|asked many questions]. In the end {heF} bought {b2}. {NG}"
            ' laughed. "[What will you do with {b2}|That is no fun|How dull]!" said {NG}.',
            "But {NF} [used it every day|worked with it|had a plan]. {gain}. After {n} weeks {NF} had [ten|twelve|twenty] coins in"
            " {hisF} jar. [{heF:c} counted them twice.|They rang like bells.|{hisF:c} {H} was amazed.]",
            '"[How did you do it|I wish I had been so clever|You were right]," said {NG}. "[I will show you|Come, we can work'
            ' together|Here are three coins, start again]," said {NF}. And this time {NG} [thought first|did not buy {b1}|spent them'
            " wisely].",
        ),
        (
            "What did {NG} buy? {NG} bought {b1}.",
            "What did {NF} buy? {NF} bought {b2}.",
            "How many coins did {H} give {himF}? {NF} got three coins.",
        ),
        "{NG} spent three coins on {b1}, but {NF} bought {b2} and earned more.",
    ),
    Plot(
        "clockmaker",
        "mending things",
        "cx",
        {
            "thing / fault": (
                "clock / a wheel was missing",
                "music box / a spring was bent",
                "lamp / the wick was too short",
                "bicycle / the chain had come off",
                "radio / a wire was loose",
                "toy train / a screw was gone",
            )
        },
        (
            "{heF:c} liked to take things apart. [{heF:c} wanted to know what was inside.|{hisF:c} pockets were full of screws.|{heF:c} had"
            " a little box of tools.]",
            '{day}, {AG} came with {col:a} {thing}. "[It does not work anymore|It has stopped|It is broken]," said {NG}. "[Shall I throw'
            ' it away|It was my grandmother\'s|Nobody can mend it]." "[Let me see|Do not throw it away|Give it to me]," said {NF}.',
            "{NF} opened the {thing} [with care|with a small screwdriver|on the table]. [There were so many little parts.|{heF:c} laid the"
            " parts in a row.|{heF:c} drew a picture, so as not to forget.] {heF:c} looked at every one. {atlast} {heF} saw it: {fault}.",
            "{NF} [looked in the box|searched the drawer|asked {hisF} {H}] for what {heF} needed. {heF:c} tried one way. It did not work."
            " {heF:c} tried another way. [Still nothing.|Almost!|Not yet.] On try number {n}, {heF} heard a soft sound. The {thing}"
            " worked again!",
            '"[You did it|It is alive|You are a wizard]!" {cried} {NG}. "[It only needed someone to look|I only looked closely|Nothing'
            ' is broken until you give up]," said {NF}. [After that, everyone brought {himF} their broken things.|{happyF}.]',
        ),
        (
            "What did {NG} bring? {NG} brought {col:a} {thing}.",
            "What was wrong with the {thing}? {fault:c}.",
            "Who mended the {thing}? {NF} mended the {thing}.",
        ),
        "{NF} mended {NG}'s {thing}: {fault}.",
    ),
    Plot(
        "lost_sheep",
        "looking after animals",
        "cx",
        {
            "herd / one": (
                "sheep / lamb",
                "goats / kid",
                "cows / calf",
                "geese / gosling",
                "ducks / duckling",
                "ponies / foal",
            )
        },
        (
            "{heF:c} looked after {n} {herd} on the hill. [{heF:c} knew them all by name.|Every evening {heF} counted them.|{heF:c} played"
            " a little pipe for them.]",
            '{day}, {NF} counted the {herd} at sunset. One was missing! It was the smallest {one}. "[Where can it be|I must find it|It is'
            ' all alone out there]," said {NF}. [The wind was cold.|Clouds covered the moon.|It would be dark soon.]',
            "{AG} stayed with the {herd}, and {NF} took a lantern. {heF:c} looked behind every rock. {heF:c} called, and listened, and"
            " called again. [Only the wind answered.|An owl hooted.|{hisF:c} feet were wet.] But {NF} did not go home.",
            '{then}, {heF} heard a thin cry. The {one} was [in a ditch|caught in thorns|on a narrow ledge]. "[Hold still, little one|There'
            ' you are|I have you]," said {NF}. {heF:c} [climbed down|reached out|took off {hisF} coat] and carried it home in {hisF}'
            " arms.",
            '"[You were gone so long|Is it hurt|You found it]!" {cried} {NG}. The mother ran to the {one} and [licked its ears|sniffed'
            " it|would not leave it]. {NF} counted once more: {n}. [All were there.|Now {heF} could sleep.|{endday}.]",
        ),
        (
            "How many {herd} did {NF} have? {NF} had {n} {herd}.",
            "What was missing? The smallest {one} was missing.",
            "Who stayed with the {herd}? {AG} stayed with the {herd}.",
        ),
        "{NF} looked after {n} {herd} and found the {one} that was lost.",
    ),
    Plot(
        "lemonade",
        "a little shop",
        "cx",
        {
            "sell / price": (
                "lemonade / one coin",
                "apples / two coins",
                "paper flowers / one coin",
                "cookies / one coin",
                "painted stones / two coins",
                "fresh berries / three coins",
            ),
            "wish": (
                "a new football for the school",
                "a book",
                "a bell for the cat",
                "paint for the old bench",
                "a kite",
                "a tent",
            ),
        },
        (
            '{heF:c} wanted to buy {wish}, but {heF} had no money. "[Let us open a shop|We can sell something|I have an idea]," said'
            " {hisF} friend {AG}. They would sell {sell}.",
            'They put a table [by the road|under a tree|in front of the house] and made a sign: "{sell:c}, {price}." [Then they'
            ' waited.|They sat down and smiled.|An hour went by.] But nobody came. "[This will never work|Maybe our sign is too'
            ' small|What are we doing wrong]?" {asked} {NF}.',
            '{NG} {thought}. "[Let us call out loud|Let us paint the sign {col}|Let us give the first one for free]!" {heG} said. They'
            ' did it at once. {then}, [an old man|a woman with a dog|the postman] stopped. "[How nice|What do you have there|One,'
            ' please]," came the answer.',
            "{soon} there was a line of people. [They could hardly work fast enough.|The coins went clink, clink.|{NF} took the coins, and"
            " {NG} did the rest.] By evening everything was sold, and there were {n} coins and more in the jar.",
            "They bought {wish}. [And one cup was left for each of them.|There was even a coin left.|It had never been so nice to buy"
            ' something.] "[We earned it ourselves|Same again tomorrow|We are a good team]," said {NG}. {endday}.',
        ),
        (
            "What did they sell? They sold {sell}.",
            "How much did it cost? It cost {price}.",
            "What did {NF} want to buy? {NF} wanted to buy {wish}.",
        ),
        "{NF} and {NG} sold {sell} to buy {wish}.",
    ),
    Plot(
        "old_neighbor",
        "helping neighbors",
        "cx",
        {
            "task": (
                "carry water",
                "chop wood",
                "pick apples",
                "paint the fence",
                "feed the hens",
                "sweep the leaves",
            ),
            "reward": (
                "a story every day",
                "an old compass",
                "a basket of pears",
                "a wooden horse",
                "a jar of honey",
                "a song on the fiddle",
            ),
        },
        (
            "Next door lived [old Mister Brown|old Mrs Gray|old Captain Wood]. [The garden was wild and dark.|The door"
            " was always shut.|The children were afraid of that house.]",
            "{day}, {NF}'s {O} flew over the fence. {NF} and {AG} [looked at each other|did not dare to go|stood at the gate]. \"[You"
            ' go|We must ask for it|It is only a neighbor]," said {NG}. So {NF} knocked. The door opened slowly.',
            '"[What do you want|Who is there|Yes]?" said the old neighbor. {NF} saw that the neighbor could hardly walk. [There was so'
            ' much to do in the house.|The stove was cold.|The garden was full of weeds.] "May we help you?" asked {NF}. "We can'
            ' {task}."',
            "The old face [looked surprised|became soft|changed]. {NF} and {NG} began to {task}. {worked}. They came back the next day, and"
            " the day after, for {n} days. [The neighbor began to smile.|The house grew bright.|They learned to know each other.]",
            "And what did they get? They got {reward}. [And the {toy} too, of course.|The {toy} was on the window sill all the time.]"
            ' "[I thought nobody cared|I was only lonely|You brought the sun in]," said the neighbor. After that, the door was always'
            " open.",
        ),
        (
            "What flew over the fence? {NF}'s {O} flew over the fence.",
            "How did they help? They helped to {task}.",
            "What did they get? They got {reward}.",
            "How many days did they help? They helped for {n} days.",
        ),
        "{NF} and {NG} helped an old neighbor to {task}.",
    ),
    Plot(
        "postman",
        "doing a job well",
        "xx",
        {
            "parcel": (
                "a round box",
                "a long tube",
                "a heavy sack",
                "a tiny parcel",
                "a letter with a gold edge",
                "a box with holes",
            ),
            "content": (
                "a birthday cake",
                "a fishing rod",
                "a bag of flour",
                "a ring",
                "an invitation to a feast",
                "a live turtle",
            ),
        },
        (
            "{heF:c} was the [postman|letter carrier|messenger] of the village. [Rain or shine, the letters came on time.|{hisF:c} bag was"
            " heavy, but {heF} always sang.|Everyone was glad to see {himF}.]",
            "{day}, there was {parcel} for {AG}, who lived [on top of the mountain|behind the swamp|at the end of the world, as people"
            ' said]. "[Nobody goes there|It is too far|Leave it until spring]," said the others. "[A letter is a promise|It must get'
            ' there|Somebody is waiting for it]," said {NF}.',
            "So {NF} walked. {heF:c} walked through [mud|snow|tall grass]. A [dog barked at {himF}|bridge was gone|strong wind blew {hisF}"
            " hat away]. {heF:c} [was cold|was tired|lost a shoe], but {heF} [held the parcel tight|kept it dry under {hisF} coat|did not"
            " turn back].",
            'After {n} hours {heF} knocked at the door. {NG} opened it and [could not believe it|stared|gave a shout]. "[For me|Nobody'
            ' ever writes to me|You came all this way]!" {heG} said. Inside was {content}.',
            '"Come in and get warm," said {NG}. They ate {food} by the fire. [The snow fell outside.|The wind could not get in.|They told'
            ' each other stories.] "[Who sent it|Do you know who sent it]," asked {NG}. {NF} only smiled. {friends}.',
        ),
        (
            "What did {NF} carry? {NF} carried {parcel}.",
            "What was inside? Inside was {content}.",
            "Who was it for? It was for {AG}.",
            "How many hours did {NF} walk? {NF} walked for {n} hours.",
        ),
        "{NF} carried {parcel} a long way to {NG}.",
    ),
)
