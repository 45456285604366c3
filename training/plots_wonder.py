"""Plots with a little magic. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

PLOTS = (
    Plot(
        "three_wishes",
        "wishes",
        "xx",
        {
            "giver": (
                "a golden fish",
                "a little fairy",
                "an old frog with a crown",
                "a tiny man in a bottle",
                "a silver bird",
            ),
            "w1 / bad": (
                "a mountain of cake / ants came from everywhere",
                "a river of lemonade / everything was sticky",
                "a coat of gold / it was so heavy that {heF} could not walk",
                "to be as tall as a tower / nobody could hear {himF}",
                "snow in summer / the flowers froze",
            ),
        },
        (
            '{day}, {heF} helped {giver} out of trouble. "[You have three wishes|For this you may wish three times|Choose three wishes, but'
            ' choose well]," it said.',
            "{NF} [did not think long|shouted at once|laughed for joy]. {heF:c} wished for {w1}. And there it was! [How {NF} laughed!|At first"
            " it was wonderful.|{heF:c} could not believe {hisF} eyes.] But {soon}, {bad}.",
            '{AG} saw it. "[What have you done|This must stop|You should have thought first]!" said {NG}. So {NF} had to use the second wish'
            " to [make it go away|put everything back|undo the first one]. Now there was only one wish left.",
            '"[What shall I wish for|I could be rich|I could be a king]?" said {NF}. This time {heF} sat down {s1} and thought for {n} hours.'
            " [The sun went down.|The moon came up.] {heF:c} looked at {NG}, who [had no shoes|was always cold in winter|had never seen the"
            " sea].",
            '"I wish that {NG} will be [happy|well and warm|glad] all year," said {NF}. The {col} light [danced|shone around them|went'
            ' out softly]. "[That was the best wish of all|You have chosen well]," said {giver}, and it was gone. And {NF}? {heF:c} was'
            " happy too, [without any wish|because {hisF} friend was].",
        ),
        (
            "Who gave {NF} three wishes? {giver:c} gave {NF} three wishes.",
            "What was the first wish? The first wish was {w1}.",
            "What went wrong? {bad:c}.",
            "Who was the last wish for? The last wish was for {NG}.",
        ),
        "{NF} got three wishes from {giver} and gave the last one to {NG}.",
    ),
    Plot(
        "dragon",
        "a dragon",
        "cc",
        {
            "need": (
                "a toothache",
                "a thorn in its foot",
                "nobody to play with",
                "a cold that put out its fire",
                "a splinter in its tail",
                "a bad dream every night",
            )
        },
        (
            "On the mountain above the village lived a {col} dragon. [At night it roared.|Smoke came from its cave.|Nobody dared to go there.]"
            ' "[It will eat us all|We must send a knight|We must move away]," the people said.',
            '"[Why does it roar|Has anyone asked it what it wants]?" said {NF}. [Everyone laughed.|Nobody answered.] So {NF} packed {food}'
            " and climbed the mountain. {NG} came too, [but walked behind|because friends do not go alone|with a very long stick].",
            'The cave was [dark|hot|full of smoke]. Two eyes shone like lamps. "Who is there?" roared the dragon. {NF}\'s knees shook. "[I am'
            ' {NF}, and this is {NG}|We brought you {food}|We only want to ask]," {heF} said. "Why do you roar every night?"',
            'The dragon [was surprised|put down its head|blinked]. A big tear ran down its nose. It had {need}! "[Nobody ever asked me|I do not'
            ' want to eat anyone|I roar because it hurts]," it said. "[We can help|Let me see|Poor dragon]," said {NG}. They'
            " [helped|worked|stayed with] the dragon until it felt better.",
            "The next day the people saw the dragon [fly over the roofs|land in the square|sit by the well], with {NF} and {NG} on its back."
            " [First they ran away, and then they came out again.|The mayor took off his hat.] After that, the dragon [lit the lamps in the"
            " evening|kept everyone warm in winter|baked the bread with its fire].",
        ),
        (
            "What color was the dragon? The dragon was {col}.",
            "What was wrong with the dragon? It had {need}.",
            "What did {NF} bring? {NF} brought {food}.",
            "Who went with {NF}? {NG} went with {NF}.",
        ),
        "{NF} and {NG} went to the {col} dragon and helped it, because it had {need}.",
    ),
    Plot(
        "moon",
        "the moon",
        "xx",
        {
            "why / how": (
                "it was lonely / sang a song to it",
                "it had a cold / sent up a warm scarf",
                "it was hidden by the clouds / asked the wind for help",
                "it had fallen into the well / pulled it out with a bucket",
                "it was tired / tucked it in with a cloud",
            )
        },
        (
            "Every night {heF} said good night to the moon. [It was {hisF} friend.|It shone on {hisF} bed.|It was the last thing {heF} saw.]"
            " But one night the moon did not come.",
            '{NF} waited {n} nights. [It stayed dark.|Only the stars were there.|The owls were worried.] "[Where is the moon|Something is'
            ' wrong|We must find it]," {heF} said to {AG}. They took {col:a} lantern and went out.',
            'They asked the [bat|owl|moth]. "[Ask the wind|I fly only low]," it said. They asked the wind. "[Climb the highest hill|Look'
            ' where the water is]," said the wind. [So they walked half the night.|So up they went.] And there they found the moon, and'
            " {why}.",
            '"[Poor moon|Do not be sad|We will help you]," said {NG}. So {NF} {how}. [It took a while.|At first nothing happened.] Then a'
            " little light came, and then more, and then [the whole hill was silver|their shadows lay on the grass|the sea began to"
            " shine].",
            'The moon rose, [slowly|round and bright|higher and higher]. "Thank you, {NF}. Thank you, {NG}," it said, [very softly|in a'
            " voice like a bell]. That night it shone through two windows, [one after the other|longer than before]. {endday}.",
        ),
        (
            "What was missing? The moon was missing.",
            "Why did the moon not come? The moon did not come because {why}.",
            "How did {NF} help the moon? {NF} {how}.",
            "What color was the lantern? The lantern was {col}.",
        ),
        "The moon did not come because {why}, so {NF} {how}.",
    ),
    Plot(
        "magic_object",
        "magic",
        "cx",
        {
            "obj / power": (
                "hat / whoever wore it could not be seen",
                "pencil / everything it drew became real",
                "pair of shoes / they ran as fast as the wind",
                "spoon / the soup never came to an end",
                "bell / everyone who heard it had to dance",
                "carpet / it could fly",
                "mirror / it always told the truth",
            ),
            "trouble": (
                "the mayor's hat flew off",
                "the cow ran into the church",
                "nobody could stop",
                "the whole street was full",
                "the teacher sat on the roof",
            ),
        },
        (
            "{day}, {heF} found an old {obj} {s1}. [It did not look special.|It was dusty and {col}.|Somebody had left it there.] But it was"
            " magic: {power}!",
            "{NF} tried it at once. [How strange that was!|What fun it was!|{heF:c} laughed until {heF} cried.] {heF:c} showed it to {AG}."
            ' "[Be careful|Magic is not a toy|May I try too]?" said {NG}. But {NF} did not listen.',
            "All day long {NF} played with the {obj}. {soon} there was trouble: {trouble}. [People shouted.|Dogs barked.|It got worse and"
            ' worse.] "[Stop it|Make it stop|Who did this]!" they {cried}. {NF} [did not know how|was frightened|turned pale].',
            '"[Say please to it|Turn it around|Read what is written inside]," said {NG}. {NF} looked closely. There were small letters: "[Use'
            ' me to help, not to play|Three times and no more|Only for those who share]." {NF} [said sorry|put it down|closed {hisF} eyes],'
            " and at once it was quiet.",
            "After that, {NF} used the {obj} only to [help others|help old people|make sad children laugh]. [And one day it was gone.|And {heF}"
            ' lent it to {NG} on Sundays.] "[Somebody else needs it now|It was good while it lasted|The best magic is a kind heart]," said'
            " {NG}.",
        ),
        (
            "What did {NF} find? {NF} found an old {obj}.",
            "What was magic about it? {power:c}.",
            "Where did {NF} find it? {NF} found it {s1}.",
            "What trouble was there? There was trouble: {trouble}.",
        ),
        "{NF} found a magic {obj}: {power}.",
    ),
    Plot(
        "giant",
        "a gentle giant",
        "cc",
        {
            "lostthing": ("hat", "glasses", "left boot", "silver spoon", "little dog", "song book"),
            "lost": ("his {lostthing}",),
        },
        (
            "{day}, the ground shook. Boom, boom, boom! A giant came over the hill. [Everyone ran into the houses.|The windows rattled.|The"
            " hens hid under the cart.] Only {NF} and {NG} stayed {at}.",
            'The giant sat down and [sighed like the wind|began to cry|put his head in his hands]. His tears made {n} puddles. "[Why are you'
            ' crying|What is the matter]?" {cried} {NF} loudly. "[I have lost my {lostthing}|Somewhere here I lost my {lostthing}]," said the giant. "[I'
            ' am too big to look for it|I break everything when I look]."',
            '"[We are small, so we can look everywhere|We will help you|Do not move, we will find it]," said {NG}. They looked {s1}. They'
            ' looked {s2}. [They asked the birds.|They looked in the wood and in the lake.] {atlast} {NG} laughed. "[What is that on'
            ' your back|Look behind you]!"',
            "There it was: {lost} [hung on his belt|was in his own pocket|was stuck to his coat]! The giant [turned red|laughed so that the"
            ' trees shook|clapped his hands]. "[How silly I am|I looked everywhere but there]," he said. The people came out of their'
            " houses.",
            "To say thank you, the giant [carried the children on his shoulders|dug a new well|moved the big rock from the road]. He ate {food},"
            ' forty plates of it. "[Come again|You are not scary at all]," said {NF}. And every year [he came back|they heard boom, boom,'
            " boom, and nobody ran away].",
        ),
        (
            "What did the giant lose? The giant lost {lost}.",
            "Who helped the giant? {NF} and {NG} helped the giant.",
            "What did the giant eat? The giant ate {food}.",
            "Why did the giant cry? The giant cried because he lost {lost}.",
        ),
        "{NF} and {NG} helped a giant find {lost}.",
    ),
    Plot(
        "king_contest",
        "a contest",
        "cx",
        {
            "task / try": (
                "make the princess laugh / told the story of {hisF} own bad day",
                "bring the most useful thing / brought a cup of water",
                "guess what was in the box / asked to shake it first",
                "bring the finest music / played on a blade of grass",
                "find the softest pillow / let {himH} rest on a heap of new hay",
            ),
            "himH": ("him",),
        },
        (
            'The king gave a feast. "Whoever can {task} shall have a [wish|bag of gold|white horse]," he said. [People came from far away.|The'
            " hall was full.|Trumpets sounded.] {NF} wanted to try too.",
            '"[Go away|Go home, little one|This is not for children]," the guards laughed. But {AG} said, "[Let {himF} try|Everyone may try|It'
            ' is only fair]." So {NF} stood [at the end of the line|behind a fat duke|between two lords].',
            "One after another came forward. [They wore silk and gold.|They used long words.|They bowed very low.] The king [yawned|shook his"
            ' head|looked sad]. "[No, no, no|Is that all|Next]," he said. {n:c} tried, and {n} failed. Then it was {NF}\'s turn.',
            "{NF} had nothing but [bare feet|an old coat|a good idea]. {heF:c} bowed and {try}. [It was very quiet.|Someone laughed.|The king"
            ' leaned forward.] Then the king began to smile. "[That is it|At last|This is what I was looking for]!" he {cried}.',
            '"What do you wish?" asked the king. "[A garden for all the children|Bread for everyone in the village|That {NG} and I may come'
            ' again]," said {NF}. [The king gave it gladly.|Everybody cheered.] And the guards? [They bowed when {NF} went out.|They never'
            " laughed at a child again.]",
        ),
        (
            "What did the king ask for? The king asked people to {task}.",
            "What did {NF} do? {NF} {try}.",
            "Who said that {NF} should try? {AG} said so.",
        ),
        "The king asked people to {task}, and {NF} {try}.",
    ),
    Plot(
        "lonely_robot",
        "a robot",
        "cc",
        {
            "job": (
                "sweep the streets",
                "carry boxes",
                "light the lamps",
                "count the bottles",
                "open the gate",
                "water the trees",
            ),
            "rname": ("Bolt", "Tick", "Rivet", "Seven", "Gizmo", "Copper Jack"),
        },
        (
            "In {hisF} town there was a robot called {rname}. Its job was to {job}. [Day after day it did its work.|It never stopped.|Its"
            " lamps were {col}.] Nobody ever talked to it.",
            '{day}, {NF} and {NG} walked by. The robot stood still. [A drop of oil ran down its face.|Its lamp was dim.|It did not move.] "[Are'
            ' you broken|Is something wrong|Why do you not work]?" {asked} {NF}. "[I am not broken|All parts work]," said {rname}. "[But'
            ' there is a hole inside me|But something is missing]."',
            '{NG} looked for a hole. There was none. [They oiled its joints.|They gave it a new battery.|They polished it.] "[Is it better'
            ' now|Does that help]?" asked {NG}. "No," said {rname}. {NF} {thought}. "[I know what is missing|It is lonely|It has no'
            ' friends]!" {heF} said.',
            "So they taught {rname} to play. [It was good at hide and seek, but it beeped.|It threw the ball over the roofs.|It counted to a"
            " million when they hid.] They laughed [until it was dark|so much that it hurt]. {rname} made a new sound: [ha, ha, beep|brr, brr,"
            " ding]. It was laughing too!",
            '"[The hole is gone|Now nothing is missing|What is this warm feeling]?" said {rname}. "That is [a friend|being happy|what friends'
            ' are for]," said {NF}. After that, {rname} did its work every morning and played with them every afternoon. [Its lamps had'
            " never been so bright.|And the whole town said good morning to it.]",
        ),
        (
            "What was the robot called? The robot was called {rname}.",
            "What was the robot's job? Its job was to {job}.",
            "What was missing? The robot had no friends.",
            "What color were its lamps? Its lamps were {col}.",
        ),
        "{NF} and {NG} became friends with a robot called {rname}.",
    ),
    Plot(
        "little_ship",
        "the sea",
        "xx",
        {
            "cargo": ("oranges", "wool", "lamps", "salt", "letters", "bells"),
            "isle": (
                "an island with one palm tree",
                "a light on a rock",
                "a bay full of dolphins",
                "a harbor they did not know",
            ),
        },
        (
            "{NF} had a small ship with {col} sails. [It was old, but it did not leak.|It was the smallest ship in the harbor.|It was called"
            " the Merry Duck.] {AG} was {hisF} sailor. They carried {cargo} across the sea.",
            "{day}, they sailed out with {n} boxes of {cargo}. [The gulls cried above them.|The water was blue and calm.|The land grew small"
            ' behind them.] But in the night a thick fog came. "[I cannot see my own nose|Where are we|Which way is home]?" said {NG}.',
            '"[We must not be afraid|Listen|Drop the anchor]," said {NF}. They [rang the bell|blew the horn|sang as loud as they could]. [No'
            ' answer.|Only the waves answered.] {then}, something answered from far away. "[There|Did you hear that|Go that way]!" {cried}'
            " {NG}.",
            "Slowly, slowly they sailed on. And out of the fog came {isle}! [They were safe.|A kind old woman stood there with a lamp.|Someone"
            " waved.] They stayed until morning, ate {food} and gave [her|the people] one box of {cargo} to say thank you.",
            'In the morning the sky was clear. "[Without your good ears we would be lost|You steered well]," they said to each other. And'
            " when they came home, [the whole harbor was waiting|the bells rang|everyone wanted to hear the story]. {endday}.",
        ),
        (
            "What did the ship carry? The ship carried {cargo}.",
            "What color were the sails? The sails were {col}.",
            "What came out of the fog? {isle:c} came out of the fog.",
            "How many boxes did they have? They had {n} boxes.",
        ),
        "{NF} and {NG} sailed with {cargo}, got lost in fog, and found {isle}.",
    ),
    Plot(
        "wind_thief",
        "the wind",
        "xx",
        {"taken": ("hat", "kite", "letter", "washing", "umbrella", "song sheet")},
        (
            "{day}, the wind was in a wild mood. Whoosh! It took {NF}'s {col} {taken} [right out of {hisF} hands|and carried it"
            ' away|and blew it over the roofs]. "[Stop|Give it back|Come back]!" {cried} {NF}.',
            '{NF} ran after it. {heF:c} ran past {AG}. "[Why are you running|Where are you going]?" {asked} {NG}. "The wind has stolen my'
            ' {taken}!" "[Then I will run with you|Four legs are faster than two|I know where the wind lives]," said {NG}.',
            "They ran [over the bridge|through the corn|past the mill], and up the hill. The {taken} [danced in front of them|flew higher|hung"
            " in a tree for a moment]. [Almost!|{NF} jumped, but missed.|Each time it got away.] At the top they [fell down in the"
            " grass|could not run anymore|had no breath left].",
            '"[Dear wind|Please, wind], why do you take our things?" asked {NG}. The wind grew quiet. "[I only wanted someone to play'
            ' with|Nobody ever runs with me|You all close your windows]," it whispered. {NF} and {NG} looked at each other. "[Then play with'
            ' us|You only had to ask]," said {NF}.',
            "So they played [catch|tag|a chasing game] with the wind for {n} hours. It [blew dandelions at them|rolled their hats|turned the"
            " mill just for fun]. In the evening the {taken} lay softly at {NF}'s feet. \"[Thank you, wind|Until tomorrow|Good night,"
            ' wind]," said {NF}, and a small breeze kissed {hisF} cheek.',
        ),
        (
            "What did the wind take? The wind took {NF}'s {col} {taken}.",
            "Why did the wind take it? The wind wanted someone to play with.",
            "Who ran with {NF}? {AG} ran with {NF}.",
            "How long did they play? They played for {n} hours.",
        ),
        "The wind took {NF}'s {taken}, because it wanted someone to play with.",
    ),
)
