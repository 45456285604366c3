"""Plots about school, questions and mistakes. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

PLOTS = (
    Plot(
        "first_day",
        "the first day of school",
        "cc",
        {
            "thing": (
                "a song about the days",
                "the first three letters",
                "how to count to ten",
                "a clapping game",
                "the name of every bird in the yard",
                "how to tie a knot",
            )
        },
        (
            "Today was {hisF} first day of school. [{heF:c} had a new bag.|{hisF:c} shoes were shiny.|{heF:c} had been awake since five.]"
            " {hisF:c} {H} walked with {himF} to the gate.",
            '"[I do not want to go in|What if nobody likes me|Please stay with me]," said {NF}. "[I will be here at noon|You will see,'
            ' the time will fly|Everyone in there is new today]," said {hisF} {H}, and {heH} gave {himF} {O:a} for luck.',
            "In the classroom, {NF} sat down {s1}. [Everyone talked at once.|The room was big.|{heF:c} did not dare to look up.] Next to"
            ' {himF} sat {NG}. {NG} [was crying a little|looked scared too|held {hisG} bag tight]. "[Is it your first day too|Hello, I am'
            ' {NF}|Do you want to hold my {toy}]?" {asked} {NF}.',
            "{NG} [nodded|smiled|dried {hisG} eyes]. The teacher taught them {thing}. [They shared a pencil.|They laughed at the same"
            " things.|They ate {food} together.] And {soon} the bell rang!",
            '"[How was it|Were you afraid|Did you learn something]?" asked {hisF} {H}. "[Can I go back tomorrow|I learned {thing}|I have'
            ' a friend called {NG}]!" said {NF}. {heF:c} [talked all the way home|waved to {NG}|had forgotten all about being afraid].',
        ),
        (
            "What did the teacher teach them? The teacher taught them {thing}.",
            "Who sat next to {NF}? {NG} sat next to {NF}.",
            "What did {NF} get for luck? {NF} got {O:a} for luck.",
        ),
        "On the first day of school, {NF} met {NG} and learned {thing}.",
    ),
    Plot(
        "reading",
        "reading",
        "cx",
        {
            "book": (
                "a brave mouse",
                "a ship in a storm",
                "a dragon who could not fly",
                "a boy on the moon",
                "two bears and a bell",
                "a girl who talked to birds",
            )
        },
        (
            '{heF:c} could not read yet. [The letters looked like ants.|The words would not hold still.|{heF:c} always lost the line.] "[I'
            ' will never read|Books are not for me]," said {NF}.',
            "{day}, {heF} went to the library with {AG}. There was a book about {book}. [The pictures were beautiful.|On the cover was {col:a}"
            ' star.] "[Read it to me|What does it say|Please read it]," said {NF}. "[Let us read it together|You read one word, and I'
            ' read one word]," said {NG}.',
            "The first word was [the|a|one]. {NF} [put {hisF} finger under it|said it slowly|read it out]. [Then came a longer word.|Then came"
            ' a hard one.] "[Say each sound|Take it piece by piece|Do not hurry]," said {NG}. It took {n} minutes to read one page.',
            "They met every day. {NF} read [to the cat|to {hisF} {H}|to the trees]. [Some words were hard, but some were old friends.|The ants"
            " became letters, and the letters became words.|Every day {heF} read one more page.]",
            '{atlast}, {NF} read the last page all alone. ["The end," {heF} read, and {heF} closed the book.|{heF:c} did not want it to'
            ' end.|{NG} clapped.] "[Is there another one|What shall I read next|Now I will read to you]!" said {NF}. {NG} smiled. "There'
            ' are a thousand more."',
        ),
        (
            "What was the book about? The book was about {book}.",
            "Who helped {NF} to read? {AG} helped {NF} to read.",
            "Where did they find the book? They found it in the library.",
        ),
        "{NF} learned to read with {NG} and a book about {book}.",
    ),
    Plot(
        "question_why",
        "asking questions",
        "cx",
        {
            "why / because": (
                "the sky is blue / the air scatters the blue light of the sun",
                "leaves fall / the trees rest in winter",
                "it gets dark / the earth turns away from the sun",
                "bees visit flowers / they gather nectar to make honey",
                "the moon changes / we see a different part of it in the light",
                "ice floats / ice is lighter than water",
                "birds fly south / there is more food where it is warm",
                "bread rises / the yeast makes little bubbles",
            )
        },
        (
            '{heF:c} asked questions from morning to night. ["Why is water wet?"|"Why do cats purr?"|"Where does the wind sleep?"] [Nobody'
            " could answer them all.|Everyone was a little tired of it.|{hisF:c} {H} only laughed.]",
            '{day}, {NF} wanted to know why {why}. {heF:c} asked {hisF} {H}. "[That is just how it is|I do not know|Ask someone else]," said'
            ' {hisF} {H}. {heF:c} asked the [cook|driver|gardener]. "[I never thought about it|I have no time]," was the answer.',
            'Then {NF} asked {AG}. {NG} [thought about it|did not laugh|looked up]. "[I do not know either|That is a good question], but we can'
            ' find out. [Let us look in a book|Let us ask the teacher|Let us watch closely]."',
            "They [read three books|watched for {n} days|asked the teacher after class] and [wrote everything down|drew a picture|talked about"
            " it]. {atlast}, they knew: {because}.",
            '"[So that is why|Now I understand|How clever the world is]," said {NF}. {heF:c} was happy [for a minute|all evening]. Then {heF}'
            ' said, "[But why|And who found that out first|I have another question]?" {NG} laughed. "[Come on, then|Let us find'
            ' out]," said {NG}.',
        ),
        (
            "What did {NF} want to know? {NF} wanted to know why {why}.",
            "What did they find out? They found out: {because}.",
            "Who helped {NF} find out? {AG} helped {NF}.",
        ),
        "{NF} asked why {why}, and found out with {NG}.",
    ),
    Plot(
        "lost_tooth",
        "a loose tooth",
        "cx",
        {
            "how": (
                "it fell into the soup",
                "it stuck in an apple",
                "it came out with a sneeze",
                "it popped out during a song",
                "it fell out on the swing",
            )
        },
        (
            "{heF:c} had a loose tooth. [It went wiggle, wiggle.|{heF:c} moved it with {hisF} tongue all day.|It had been loose for {n} days.]"
            " {hisF:c} friend {AG} [had lost one already|knew all about teeth|wanted to see it].",
            '"[Will it hurt|What if it never comes out|What if I swallow it]?" asked {NF}. "[It is easy|You will hardly notice|It does not'
            ' hurt at all]," said {NG}. "[Pull it with a string|Eat something hard|Just wait]." {NF} did not want to.',
            '{day}, {NF} was eating {food}. And then {how}! {NF} [put a finger in the gap|looked in the mirror|stared]. "[My tooth|It is out|It'
            ' is gone]!" {cried} {NF}. [It had not hurt at all.|There was a little hole.|{hisF:c} words sounded funny.]',
            "{hisF:c} {H} [gave {himF} a little box for it|wrapped it in paper|washed it]. At night {NF} put it under {hisF} pillow. [The moon"
            " looked in.|{heF:c} tried to stay awake.|{heF:c} listened for small feet.]",
            'In the morning the tooth was gone, and there was [a shiny coin|a small note|{O:a}] instead. {NF} ran to {NG}. "[Look at my gap|Now'
            ' we look the same|You were right]!" said {NF}. They both [grinned|laughed|whistled through their gaps].',
        ),
        (
            "How did the tooth come out? {how:c}.",
            "What was {NF} eating? {NF} was eating {food}.",
            "Where did {NF} put the tooth? {NF} put it under {hisF} pillow.",
        ),
        "{NF} had a loose tooth, and {how}.",
    ),
    Plot(
        "borrowed",
        "giving things back",
        "xx",
        {},
        (
            '{day}, {heF} borrowed {O:a} from {AG}. "[You may have it for {n} days|Please bring it back soon|Take good care of it]," said'
            ' {NG}. "I promise," said {NF}.',
            "{NF} [used it every day|liked it very much|showed it to everyone]. The days went by. {NF} [forgot the promise|did not think of"
            " {NG}|kept it one more day, and one more]. [It was just too nice to give back.|It almost felt like {hisF} own.]",
            'Then {NG} asked, "Where is my {toy}?" {NF} looked {s1}. It was not there. {NF} looked {s2}. [Not there.|Nothing.] "[I have lost'
            ' it|I cannot find it|I am so sorry]," said {NF}. {NG} [said nothing|was very sad|turned away].',
            "{NF} felt [awful|small|ashamed]. {heF:c} looked all evening [with a lamp|in every corner|until it was dark]. {atlast}, {heF} found"
            " it {s3}. It was dirty, so {heF} [washed it|cleaned it|made it shine] until it looked like new.",
            "{NF} [ran to {NG}|brought it back at once|knocked at {NG}'s door]. \"[Here is your {toy}|I should have taken better care of it|I am"
            ' sorry I was late]," {heF} said, and {heF} gave {NG} {food} too. "[Thank you for being honest|It looks better than'
            ' before]," said {NG}. After that, {NF} always gave things back in time.',
        ),
        (
            "What did {NF} borrow? {NF} borrowed {O:a}.",
            "Where was the {toy} in the end? The {toy} was {s3}.",
            "Whose {toy} was it? It was {NG}'s {toy}.",
            "Where did {NF} look first? {NF} looked {s1} first.",
        ),
        "{NF} borrowed {NG}'s {O}, lost it, found it and gave it back.",
    ),
    Plot(
        "painting",
        "making pictures",
        "xx",
        {
            "subject / looks": (
                "a horse / a potato with legs",
                "a ship / an old shoe",
                "a cat / a pillow with ears",
                "the sun / a fried egg",
                "a house / a broken box",
                "a tree / a green cloud",
            )
        },
        (
            "{heF:c} liked to paint. {day}, {heF} painted {subject}. [{heF:c} used all the colors.|{heF:c} worked until {hisF} nose was"
            " {col}.|It took all morning.]",
            '"[What is that|Is it finished]?" asked {AG}. "It looks like {looks}!" [{NG} laughed.|{NG} did not mean to be unkind.] {NF}'
            ' [turned red|put down the brush|tore the paper in two]. "[I will never paint again|I cannot paint]," said {NF}.',
            '{NG} [was sorry|felt bad|stopped laughing]. "[I should not have said that|I was unkind|I cannot paint at all]," {heG} said.'
            ' "[But the colors are beautiful|But I like the way it moves|May I see it again]?" [{NG} put the pieces together.|{NG} picked up'
            " the brush.]",
            '"[Look closely at a real one|Paint what you see, not what you think|Try once more]," said {hisF} {H}. So {NF} [looked for a long'
            " time|sat outside|took a new sheet]. {heF:c} painted {subject} {n} times. [Each one was better.|The last one almost moved.|{NG}"
            " watched without a word.]",
            '{hisF:c} {H} hung them all on the wall, in a row. "[You can see how you learned|The first one is my favorite|What a fine'
            ' row]," said {NG}. And the first one, the one like {looks}? [It hung in the middle|{NF} gave it to {NG}|It made everyone'
            " smile].",
        ),
        (
            "What did {NF} paint? {NF} painted {subject}.",
            "What did it look like to {NG}? It looked like {looks}.",
            "How many times did {NF} paint it? {NF} painted it {n} times.",
        ),
        "{NF} painted {subject}, and with practice it got better.",
    ),
    Plot(
        "counting",
        "counting",
        "xx",
        {
            "stuff / bag": (
                "shells / bucket",
                "nuts / sack",
                "eggs / basket",
                "stones / box",
                "apples / crate",
                "feathers / hat",
            ),
            "a / b / c": (
                "two / three / five",
                "three / four / seven",
                "four / five / nine",
                "two / six / eight",
                "five / five / ten",
                "three / six / nine",
                "four / two / six",
                "one / six / seven",
            ),
        },
        (
            "{heF:c} collected {stuff}. [{heF:c} kept them in a {bag}.|Every {toy} and box was full of them.|No two were the same.] {hisF:c}"
            " friend {AG} collected {stuff} too.",
            '{day}, {NF} had {a} {stuff} and {NG} had {b}. "[I have more|Mine are nicer|You have fewer than me]," said {NG}. "[That is not'
            ' fair|Mine are bigger|Give me one of yours]," said {NF}. {soon} they were [angry|shouting|not friends anymore].',
            '{NF}\'s {H} heard them. "[Why do you quarrel|What is all this noise]?" {heH} asked. "[What happens if you put them together|Put'
            ' them all in one {bag}]," {heH} said. They [frowned|looked at each other|did as they were told].',
            'They counted [slowly|together|out loud]. {a:c} and {b} make {c}! "[Now we have {c}|{c:c} is more than {b}|Together we have the'
            ' most]," said {NF}. They laid them [in a circle|in a long line|in the shape of a star]. It was [beautiful|the finest thing'
            " they had ever made].",
            "After that, they collected {stuff} together. [Whoever found one put it in the {bag}|There was only one {bag}, for both of"
            " them|They never asked whose it was]. {endday}.",
        ),
        (
            "How many {stuff} did {NF} have? {NF} had {a} {stuff}.",
            "How many {stuff} did {NG} have? {NG} had {b} {stuff}.",
            "How many {stuff} did they have together? They had {c} {stuff} together.",
        ),
        "{NF} had {a} {stuff} and {NG} had {b}; together they had {c}.",
    ),
    Plot(
        "nickname",
        "being different",
        "aa",
        {
            "odd / use": (
                "very long ears / heard the fox from far away",
                "a very loud voice / called for help when the river rose",
                "very big feet / walked over the snow without sinking",
                "a crooked tail / hung from a branch and reached the nest",
                "a white spot that shone / led the way in the dark",
                "a long nose / smelled the smoke before anyone else",
            )
        },
        (
            '{heF:c} had {odd}. [Nobody else had that.|The others stared.|The others laughed and made up names.] "[I wish I were like'
            ' everyone else|Why am I different]," said {NF}.',
            "{NF} tried to hide it. {heF:c} [wore a big hat|stayed at home|walked behind the others]. [It did not help.|It only made things"
            ' worse.] Only {AG} [was always kind|did not laugh|played with {himF}]. "[I like you as you are|Different is not bad|Wait and'
            ' see]," said {NG}.',
            "{day}, there was danger in the [forest|valley|meadow]. [Everyone was afraid.|Nobody knew what to do.|It was a terrible night.]"
            " But {NF} had {odd}, and so {heF} {use}.",
            '"[Follow {NF}|Listen to {NF}|Do as {NF} says]!" {cried} {NG}. They did, and [all of them were saved|not one of them was'
            " hurt|they all got home]. [The others looked at the ground.|Nobody laughed now.]",
            '"[We are sorry|We were unkind|We were wrong]," they said. "[Without you we would be lost|We wish we had that too]." {NF} [held'
            ' {hisF} head high|smiled at {NG}|took off the hat]. "[I am glad I am me|It is good that we are not all the same]," said'
            " {NF}.",
        ),
        (
            "What was different about {NF}? {NF} had {odd}.",
            "Who was always kind to {NF}? {AG} was always kind to {NF}.",
            "How did {NF} help the others? {NF} {use}.",
        ),
        "{NF} had {odd} and was laughed at, but then {heF} {use}.",
    ),
)
