"""Plots at home: cooking, cleaning, truth, bedtime. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

DISHES = (
    "apple pie / apples / flour / butter",
    "honey cake / eggs / flour / honey",
    "soup / carrots / beans / salt",
    "bread / flour / water / yeast",
    "jam / berries / sugar / lemon",
    "porridge / oats / milk / honey",
    "salad / tomatoes / lettuce / olives",
    "plum cake / plums / sugar / flour",
    "rice pudding / rice / milk / cinnamon",
    "corn bread / corn / eggs / milk",
    "pumpkin soup / pumpkin / onions / cream",
    "nut bread / nuts / flour / raisins",
)

PLOTS = (
    Plot(
        "cook",
        "cooking",
        "xx",
        {"dish / i1 / i2 / i3": DISHES},
        (
            "{heF:c} wanted to make some {dish} for {hisF} {H}. [It was a surprise.|It was {hisF} {H}'s birthday.|{hisF:c} {H}"
            " had worked hard all week.|]",
            '[In the kitchen|At home|On the shelf], {NF} found {i1} and {i2}. But there was no {i3}! "[What can I do now|I'
            ' cannot make {dish} without {i3}|Where can I get {i3}]?" [said|sighed|asked] {NF}.',
            '{NF} went to {AG}. "[Do you have any {i3}|May I have some {i3}, please]?" asked {NF}. "[Yes, I do|Of'
            ' course]," said {NG}, "[but may I help you cook|if I may have the first bite]?" "[Yes|Sure|Please do]!" said'
            " {NF}.",
            "They put the {i1}, the {i2} and the {i3} [together|in a big bowl|in a pot]. They mixed and mixed. [It made a big"
            " mess.|Some of it landed on {NG}'s nose.|The spoon went round and round.] {soon} the whole house smelled"
            " [sweet|good|wonderful].",
            'When {hisF} {H} came home, the {dish} was ready. "[How lovely|What a nice surprise]! Who made this?" asked'
            ' {hisF} {H}. "{NG} and I did," said {NF}. They ate it all up, and [not a crumb was left|everyone wanted'
            " more|they were very full].",
        ),
        (
            "What did {NF} make? {NF} made {dish}.",
            "What was missing? The {i3} was missing.",
            "Who helped {NF} cook? {AG} helped {NF}.",
            "Who was the {dish} for? It was for {NF}'s {H}.",
        ),
        "{NF} and {NG} made {dish} for {NF}'s {H}.",
    ),
    Plot(
        "truth",
        "honesty",
        "cx",
        {
            "th": (
                "vase",
                "cup",
                "window",
                "plate",
                "lamp",
                "jar",
                "clock",
                "mirror",
                "teapot",
                "bowl",
            )
        },
        (
            "{heF:c} lived with {hisF} {H}. There was one rule in the house: no [running|ball games|jumping|wild games] near"
            " the {col} {th}.",
            "{day}, {NF} forgot the rule. Crash! The {col} {th} fell down and broke. {NF} [looked around|held {hisF}"
            " breath|stood very still]. Nobody had seen it. {heF:c} hid the pieces [under the rug|in a box|behind the"
            " curtain|under the bed].",
            '[At dinner|Later|That evening], {hisF} {H} asked, "Where is the {th}?" {NF} [said nothing|looked at {hisF}'
            ' feet]. "Maybe {AG} took it," {heF} said [very quietly|at last]. [But the words felt bad in {hisF}'
            " mouth.|But {hisF} tummy hurt.]",
            "{NF} could not sleep. [{heF:c} thought about {NG}.|It was not fair to {NG}.|The moon seemed to look at {himF}.] So"
            ' {heF} got up and [went to {hisF} {H}|told the truth]. "I broke the {th}, and I told a lie. I am sorry," said'
            " {NF}.",
            '{hisF:c} {H} [gave {himF} a hug|sat down on the bed]. "[Things can break. Trust is harder to fix. Thank you for'
            ' telling me|I am glad you told the truth]," {heH} said. [The next day they glued the {th} together.|In the'
            " morning, {NF} said sorry to {NG} too.] {NF} slept well [that night|after that].",
        ),
        (
            "What did {NF} break? {NF} broke the {col} {th}.",
            "Who did {NF} blame? {NF} blamed {AG}.",
            "Did {NF} tell the truth in the end? Yes, {NF} told {hisF} {H} the truth.",
        ),
        "{NF} broke a {th} and lied about it, but then told the truth.",
    ),
    Plot(
        "messy_room",
        "tidying up",
        "cx",
        {
            "found": (
                "a lost sock",
                "half a cookie",
                "an old drawing",
                "a silver coin",
                "a missing puzzle piece",
                "a letter",
            )
        },
        (
            "{hisF:c} room was a mess. [There were toys on the floor and socks on the lamp.|You could not see the floor.|Books"
            ' lay on the bed, and blocks lay under it.] "[Please tidy your room|It is time to clean up]," said {hisF} {H}.'
            ' "[Later|Not now|Tomorrow]," said {NF}.',
            "{day}, {NF} wanted to play with {hisF} {O}. But where was it? {heF:c} looked under a pile of clothes. {heF:c} looked"
            ' behind a tower of books. [The {toy} was nowhere.|{heF:c} could not find it.] "{ohno}," {said} {NF}.',
            '{AG} came to visit. "[What a mess|Did a storm come in here|How can you find anything]!" {cried} {NG}. "[Let us'
            ' make it a game|We can race|I will help]. You take the books, and I take the blocks."',
            "They [sang a song|counted the toys|laughed] while they worked. {soon} they could see the floor again. Under the"
            " bed they found {found}. And [there, in the corner,|there, behind the door,] was the {O}!",
            '"[The room looks so big now|Now I can find my things|That was almost fun]," said {NF}. {hisF:c} {H} [brought them'
            " {food}|clapped and smiled]. [From then on, {NF} put {hisF} things away every evening|{happyF}|{endday}].",
        ),
        (
            "What did {NF} look for? {NF} looked for {hisF} {O}.",
            "What did they find under the bed? They found {found}.",
            "Who helped {NF} tidy up? {AG} helped {NF}.",
        ),
        "{NF} could not find {hisF} {O} in the mess, so {heF} and {NG} tidied the room.",
    ),
    Plot(
        "bedtime",
        "bedtime",
        "cx",
        {
            "noise / cause": (
                "tap, tap, tap / a branch at the window",
                "creak, creak / the old stairs",
                "drip, drip / the tap in the kitchen",
                "hoo, hoo / an owl in the tree",
                "scratch, scratch / the cat at the door",
                "whoosh / the wind in the chimney",
            )
        },
        (
            "It was late, and the house was [dark|quiet|still]. {NF} [lay in bed|could not sleep|hugged {hisF} pillow]."
            " {then}, {heF} heard something: {noise}!",
            '"[What is that|Who is there|Is it a monster]?" {NF} whispered. {heF:c} [pulled the blanket over {hisF} head|did not'
            " dare to move|held {hisF} {toy} tight]. There it was again: {noise}.",
            '{NF} called {hisF} {H}. {hisF:c} {H} came with a [lamp|candle|little light]. "[Let us find out together|Let us look'
            ' for it|Take my hand]," {heH} said. They [walked on tiptoe|went step by step|listened at the door].',
            'And what was it? It was only {cause}. "[So that was all|It was only {cause}|No monster at all]!" said {NF}. [They'
            " both laughed.|{NF} felt silly.|{NF} felt much better.]",
            '{hisF:c} {H} gave {himF} a glass of [milk|water|warm milk] and a kiss. "Good night, {NF}." "Good night," said'
            " {NF}. [Outside it went {noise}, but {NF} only smiled|Soon {heF} was fast asleep|{heF:c} dreamed of {NG}].",
        ),
        (
            "What did {NF} hear? {NF} heard something: {noise}.",
            "What made the noise? It was {cause}.",
            "Who came to help {NF}? {hisF:c} {H} came.",
        ),
        "{NF} was afraid of a noise at night, but it was only {cause}.",
    ),
    Plot(
        "rainy_day",
        "a rainy day",
        "xx",
        {
            "made": (
                "a tent of blankets",
                "a ship of boxes",
                "a puppet show",
                "a castle of pillows",
                "a train of chairs",
                "a band with pots and spoons",
            )
        },
        (
            "{NF} wanted to go out and play with {AG}. But it rained and rained. [Big drops ran down the window.|The street was"
            ' full of puddles.|The sky was as gray as a stone.] "[There is nothing to do|What a bad day|I am bored]," said'
            " {NF}.",
            '{NG} [looked out of the window|looked around the room|smiled]. "[The rain cannot come in here|We do not need the'
            ' sun to play|I have an idea]," {heG} said. "Let us make {made}!"',
            "They [ran through the house|opened every cupboard|asked {NF}'s {H}] and found [sheets and chairs|boxes and"
            " string|all they needed]. {worked}. {soon}, there it was: {made}.",
            '"[Where shall we go first|Ready|All aboard]?" {cried} {NF}. They [were pirates and kings|laughed until their'
            " sides hurt|played one game after another], and {NF}'s {H} brought them {food}.",
            '{then}, {NG} looked up. "The rain has stopped!" [A rainbow stood over the town.|The sun was shining.|The birds sang'
            ' again.] "[Oh, already|I did not even notice|Let us play here a little longer]," said {NF}, and they both'
            " laughed. {endday}.",
        ),
        (
            "What did they make? They made {made}.",
            "Why did they stay inside? They stayed inside because it rained.",
            "Who had the idea? {NG} had the idea.",
        ),
        "On a rainy day, {NF} and {NG} stayed inside and made {made}.",
    ),
    Plot(
        "new_baby",
        "a new baby",
        "cx",
        {"baby / hisB / heB": ("brother / his / he", "sister / her / she")},
        (
            "{day}, a new baby {baby} came to {NF}'s house. [Everybody came to look.|Everybody talked softly.|Everybody brought"
            " gifts.] But nobody [looked at|played with|talked to] {NF}.",
            'The baby [cried all day|slept all day|could not play]. "[I do not like the baby|The baby is dull|Send the baby'
            ' back]," {NF} told {AG}. "[Give it time|Wait a little|Babies grow]," said {NG}.',
            "One night the baby cried and cried. {NF}'s mother [rocked|carried] the baby, and {hisF} father sang, but nothing"
            " helped. {NF} [got out of bed|came in quietly|looked into the cradle]. {heF:c} [shook {hisF} {toy}|made a funny"
            " face|sang a little song].",
            'The baby stopped crying. {heB:c} looked at {NF} with big eyes. And then {heB} smiled, {hisB} very first smile! "[Look,'
            ' you are the one {heB} likes|You found the trick|Well done, {NF}]," said {hisF} mother.',
            '{NF} [felt ten feet tall|was very proud|held one tiny hand]. "[I will teach you everything|I am here|Hello, little one]," {heF} [whispered|said]. After that, {NF} [helped every day|was never lonely'
            " again|told everyone about the baby].",
        ),
        (
            "Who was new in the house? A new baby {baby} was in the house.",
            "What did {NF} do when the baby cried? {NF} made the baby smile.",
            "Who did {NF} talk to about the baby? {NF} talked to {AG}.",
        ),
        "{NF} did not like the new baby {baby} at first, but then {heF} made the baby smile.",
    ),
    Plot(
        "breakfast_alone",
        "doing it yourself",
        "cx",
        {
            "wrong": (
                "The toast was black",
                "The milk ran over the table",
                "The egg fell on the floor",
                "There was salt in the tea",
                "The jam stuck to the spoon, the cup and the cat",
            )
        },
        (
            '"I am big now," said {NF}. "[Today I will make breakfast|I can do it all alone|I do not need help]." {hisF:c} {H}'
            " [smiled|nodded|was still asleep].",
            "{NF} [put on an apron|climbed on a chair|washed {hisF} hands]. {heF:c} took [bread|eggs|plates] and cups from the"
            " shelf. [Everything went well at first.|How hard could it be?|{heF:c} whistled a tune.] Then something went wrong."
            " {wrong}!",
            '{AG} [looked in|came to the door|heard the noise]. "[What happened here|Oh my|Do you need help]?" {asked} {NG}. {NF}'
            ' [turned red|nearly cried|looked at the floor]. "[I wanted to do it alone|It is all spoiled]," {heF} said.',
            '"[Everyone makes a mess the first time|My first breakfast was worse|Let us clean up and start again]," said {NG}.'
            " They [wiped the table|swept the floor|opened the window] and began again, [slowly this time|step by"
            " step|one thing after another].",
            'When {hisF} {H} came into the kitchen, there was {food} on the table and a flower in a cup. "[Did you do this|What a'
            ' fine breakfast|I am so proud of you]!" {heH} said. {NF} and {NG} [looked at each other and laughed|smiled|said'
            " nothing about the mess].",
        ),
        (
            "What did {NF} want to make? {NF} wanted to make breakfast.",
            "What went wrong? {wrong}.",
            "What was on the table at the end? There was {food} on the table.",
        ),
        "{NF} wanted to make breakfast alone; it went wrong, but {NG} helped.",
    ),
    Plot(
        "grandparent_story",
        "old times",
        "cx",
        {
            "old / use": (
                "a wooden box / full of letters",
                "a brass key / for a door long gone",
                "a small drum / from a parade",
                "a blue scarf / from a long journey",
                "a silver watch / that had stopped",
                "a tin soldier / with one leg",
            )
        },
        (
            "{day}, {heF} visited {hisF} grandmother with {AG}. [The house smelled of {food}.|The clock went tick, tock.|The cat"
            " slept by the fire.]",
            'In the attic, {NF} found {old}, {use}. "[What is this, Grandmother|Whose is this|Is this yours]?" {asked} {NF}.'
            ' Grandmother [sat down|put on her glasses|smiled a long smile]. "[Where did you find that|I have not seen it for'
            ' years]!" she said.',
            '"When I was as small as you," she began, "[there was no light in this house but candles|we walked to school through'
            " the snow|we lived by the sea]. One day my brother gave me {old}. [I kept it all my life|It brought me"
            ' luck|I promised never to lose it]."',
            "{NF} and {NG} [listened with open mouths|did not move|asked a hundred questions]. [Outside it grew dark.|The fire"
            ' crackled.|The tea grew cold.] "[And then|What happened then|Tell us more]!" said {NG}.',
            '{atlast}, Grandmother put {old} into {NF}\'s hands. "Now it is yours," she said. "[Take good care of it|And one day'
            ' you will tell the story|Do not forget where it came from]." {NF} [held it all the way home|could not speak for'
            " joy|put it next to {hisF} bed].",
        ),
        (
            "What did {NF} find in the attic? {NF} found {old}.",
            "Who told a story? {NF}'s grandmother told a story.",
            "Who came with {NF}? {AG} came with {NF}.",
        ),
        "{NF} found {old} in the attic, and {hisF} grandmother told its story.",
    ),
)
