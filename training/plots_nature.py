"""Plots in garden, weather and wild places. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

PLOTS = (
    Plot(
        "seed",
        "patience",
        "xx",
        {
            "sd / gr": (
                "sunflower / a tall yellow flower",
                "bean / a long green vine",
                "pumpkin / a round orange pumpkin",
                "apple / a thin little tree",
                "rose / a soft red bud",
                "carrot / a row of feathery leaves",
                "pea / a plant with fat green pods",
                "poppy / a bright red flower",
                "melon / a fat striped melon",
            )
        },
        (
            '{day}, {AG} gave {himF} {sd:a} seed. "[Plant it and wait|Put it in the ground and be patient|It is small now, but'
            ' wait and see]," said {NG}.',
            "{NF} [dug a little hole|made a hole with {hisF} finger] and put the seed inside. {heF:c} [gave it water|watered it"
            ' with a small can]. [Then {heF} sat down to watch.|Then {heF} waited.] Nothing happened. "[Is it broken|Why does'
            ' it not grow]?" {asked} {NF}.',
            "The next day there was nothing. The day after, there was still nothing. {NF} [wanted to dig it up|stamped {hisF}"
            ' foot|was tired of waiting]. "[Good things take time|A seed has work to do in the dark|It is growing where you'
            ' cannot see it]," said {NG}.',
            "So {NF} watered it every day. It rained, and the sun [shone|came out|was warm]. After {n} days, a tiny green [tip|leaf"
            '|point] came out of the ground. "[Look|It is alive|It is growing]!" {cried} {NF}.',
            "It grew and grew. In the end there was {gr}. [It was taller than {NF}.|All the neighbors came to look.|The bees loved"
            ' it.] {NF} gave {NG} a seed from it. "[Now you must wait|Plant it and be patient]," said {NF}, and they both'
            " laughed.",
        ),
        (
            "What did {NF} plant? {NF} planted {sd:a} seed.",
            "How many days did {NF} wait? {NF} waited {n} days.",
            "Who gave {NF} the seed? {AG} gave {NF} the seed.",
            "What was there in the end? In the end there was {gr}.",
        ),
        "{NF} planted {sd:a} seed, waited {n} days, and it grew.",
    ),
    Plot(
        "storm",
        "a storm",
        "xx",
        {
            "shelter": (
                "a cave",
                "an old barn",
                "a hollow tree",
                "a hut in the woods",
                "a boat turned upside down",
                "a stone bridge",
            )
        },
        (
            "{day}, {NF} and {AG} went for a long walk. [The sky was blue when they left.|They carried {food} in a basket.|They"
            " walked farther than ever before.]",
            "{then}, dark clouds came over the hill. [The wind began to blow.|The first drops fell.|The birds stopped"
            ' singing.] Boom, went the thunder. "[We must hide|Run|A storm is coming]!" {cried} {NG}.',
            'They ran [as fast as they could|hand in hand|through the wet grass] until they saw {shelter}. "[In here|Quick,'
            ' inside|Over there]!" said {NF}. [They crawled inside|They jumped in|They squeezed in], and the rain came down like'
            " a river.",
            'It was [dark|cold|wet and dark]. {NG} was afraid. "[I want to go home|Will it ever stop|The thunder is so loud],"'
            ' {heG} said. "[Let us count between the flash and the boom|Let us sing|Come close and share my coat]," said {NF}.'
            " They counted to {n}, and the storm [was farther away|grew quiet|moved on].",
            "When they looked out, the sun was back, and there was a rainbow [over the fields|from one hill to the other|across the"
            ' sky]. They shared the {food} and walked home through the puddles. "[We were brave|What a day|I am glad you were'
            ' with me]," said {NG}. {endday}.',
        ),
        (
            "Where did they hide? They hid in {shelter}.",
            "Who was afraid? {AG} was afraid.",
            "What did they see after the storm? They saw a rainbow.",
            "What did they eat? They shared the {food}.",
        ),
        "{NF} and {NG} hid from a storm in {shelter}.",
    ),
    Plot(
        "lost_in_forest",
        "finding the way",
        "xx",
        {
            "sign": (
                "the moss on the trees",
                "the sound of the river",
                "the evening star",
                "the smoke of a chimney",
                "the bells of the church",
                "a line of white stones",
            )
        },
        (
            '{day}, {NF} and {AG} went into the forest to look for [mushrooms|berries|nuts]. ["Do not go too far," said {NF}\'s'
            " {H}.|Their basket was empty, and the day was long.|They went deeper and deeper.]",
            "{soon} the basket was full. But where was the path? [Every tree looked the same.|They turned left, then right.|They"
            ' walked in a circle.] "[We are lost|I do not know this place|We have been here before]," said {NG}.',
            "[It grew dark|The shadows grew long|A cold wind blew]. {NG} [began to cry|sat down on a stone|held {NF}'s arm]. \"[If"
            ' we stay calm, we will find a way|Let us stop and think|Crying will not help us, but thinking will]," said {NF}.',
            '{NF} [stood very still|climbed a tree|closed {hisF} eyes and listened]. Then {heF} noticed {sign}. "[That will lead'
            ' us|I know where we are|Follow me]!" {heF} said. They followed {sign}, [step by step|slowly|all the way].',
            '{atlast}, they saw a light. It was {NF}\'s {H} with a lantern! "[There you are|I was so worried|Thank goodness]!" {heH}'
            ' said. At home there was {food} for everyone. "[Next time we will mark our path|I was not afraid with you]," said'
            " {NG}.",
        ),
        (
            "Where did they get lost? They got lost in the forest.",
            "What helped them find the way? They followed {sign}.",
            "Who came with a lantern? {NF}'s {H} came with a lantern.",
        ),
        "{NF} and {NG} were lost in the forest, but they followed {sign} and got home.",
    ),
    Plot(
        "snow_day",
        "snow",
        "xx",
        {
            "built": (
                "a snowman with a carrot nose",
                "a snow castle",
                "a snow rabbit with long ears",
                "a tall snow tower",
                "a round snow house",
                "a long snow dragon",
            )
        },
        (
            'One winter morning {NF} looked out and saw that everything was white. "[Snow|It has snowed|Look at the snow]!"'
            " {cried} {NF}. {heF:c} put on {hisF} [boots|coat|mittens] and ran to {AG}.",
            "The snow was [deep and soft|cold and clean|up to their knees]. They [threw snowballs|fell on their backs|slid down the"
            ' hill]. "[Let us build something|Let us make something big|What shall we build]?" {said} {NG}. They made {built}.',
            "[It took them hours.|Their noses were red.|Their hands were cold.] They gave it {col:a} scarf and called it [Mister"
            ' Frost|Old Winter|Captain Cold]. "[It is the best one ever|I wish it could stay for ever|It is looking at us],"'
            " said {NF}.",
            "But after {n} days the sun [was warm|came out|grew strong]. Drip, drip, drip! {built:c} became smaller and smaller."
            ' {sadF}. "[It is going away|Our friend is melting]," said {NF}.',
            '"[It is only going on a journey|It turns into water, and the water into clouds, and the clouds into snow|It will come'
            ' back next winter]," said {NG}. {NF} [kept the {col} scarf|waved goodbye|smiled a little]. And the next winter, they'
            " built it again.",
        ),
        (
            "What did they build? They built {built}.",
            "What color was the scarf? The scarf was {col}.",
            "Why did it melt? It melted because the sun was warm.",
        ),
        "{NF} and {NG} built {built}, and it melted in the sun.",
    ),
    Plot(
        "night_sky",
        "stars",
        "xx",
        {
            "shape": (
                "a big spoon",
                "a lion",
                "a ship",
                "a swan",
                "a crown",
                "a running dog",
                "a fish",
                "a crooked letter",
            )
        },
        (
            "One clear night {NF} could not sleep. {heF:c} [went to the window|sat on the steps|climbed the hill behind the house]"
            " and looked at the stars. [There were more than {heF} could count.|They were like salt on a dark cloth.]",
            '{AG} sat down [beside {himF}|in the grass|on the wall]. "[What are you doing|Are you counting them|Can you not'
            ' sleep]?" {asked} {NG}. "I am counting," said {NF}. "[I always lose my place|There are too many|They will not'
            ' hold still]."',
            '"[Do not count them|Look for pictures|Draw lines between them]," said {NG}. "[See those {n} stars|Look over the tall'
            ' tree|Follow my finger]. They make {shape}." {NF} [looked and looked|turned {hisF} head|closed one eye]. And then'
            " {heF} saw it: {shape}!",
            '{then}, one star [fell across the sky|drew a long white line|dropped and was gone]. "[Make a wish|Quick, a wish|Did'
            ' you see that]!" said {NG}. {NF} closed {hisF} eyes and wished. "[What did you wish|Will you tell me]?" asked'
            ' {NG}. "[If I tell you, it will not come true|That is a secret]," said {NF}.',
            "[It grew cold, and they went inside|An owl called, and they said good night|They stayed until the moon came up]. {NF}"
            " fell asleep and dreamed of {shape}. [And the wish? It was to sit there again with {NG}|{endday}|In the dream the"
            " stars knew {hisF} name].",
        ),
        (
            "What did {NF} see in the stars? {NF} saw {shape}.",
            "Who sat with {NF}? {AG} sat with {NF}.",
            "Did {NF} tell the wish? No, {NF} kept the wish secret.",
        ),
        "{NF} and {NG} looked at the stars and found {shape}.",
    ),
    Plot(
        "river_boat",
        "a boat trip",
        "xx",
        {
            "boat": (
                "a raft of logs",
                "an old rowing boat",
                "a barrel",
                "a wash tub",
                "a boat of reeds",
                "a little sail boat",
            )
        },
        (
            "{NF} and {AG} lived by the river. [Every day they watched the ships.|They often asked where the river went.|They had"
            " never seen the sea.] {day}, they found {boat}.",
            '"[Let us see where the river goes|Let us sail to the sea|All aboard]," said {NF}. They packed {food} and {O:a}. [They'
            " pushed off from the bank.|The water was smooth as glass.|A duck swam beside them.]",
            "{soon} the river ran faster. [The boat turned round and round.|Water came over the side.|Rocks stuck out of the foam.]"
            ' "[Hold on tight|Paddle to the left|Watch out]!" {cried} {NG}. Splash! The {O} fell into the water.',
            "{NF} [grabbed a branch|threw a rope around a tree|pushed against a rock with a pole] and {NG} pulled with all {hisG}"
            " might. {atlast}, {boat} came to rest [on a sandy bank|in quiet water|under a willow]. They were wet, but they were"
            " safe.",
            'A [fisherman|farmer|miller] took them home on his cart. "[The sea can wait until you are bigger|You were lucky|Next time'
            ' ask first]," he said. "[At least we saw some of the river|I am hungry|I lost my {toy}]," said {NF}. "But [we did'
            ' not lose each other|we had an adventure]," said {NG}.',
        ),
        (
            "What did they sail in? They sailed in {boat}.",
            "What fell into the water? The {O} fell into the water.",
            "Where did they want to go? They wanted to see where the river goes.",
        ),
        "{NF} and {NG} went down the river in {boat} and came home wet but safe.",
    ),
    Plot(
        "clean_park",
        "keeping places clean",
        "xx",
        {
            "spot": (
                "the pond",
                "the beach",
                "the little wood",
                "the playground",
                "the river bank",
                "the old well",
            )
        },
        (
            "{hisF:c} favorite place was {spot}. [{heF:c} went there every day.|The birds sang there, and the air was sweet.|It was"
            " quiet and green.]",
            "{day}, {NF} saw [bottles and paper|cans and bags|old boxes and strings] lying about {spot}. A [duck|bird|frog] was caught"
            ' in a bag. "[Who did this|This is not right|How ugly]!" {cried} {NF}, and {heF} set it free.',
            '{NF} began to pick things up. [One, two, three.|It was too much for one.|The bag was soon full.] {AG} came by. "[What'
            ' are you doing|You did not drop that, so why do you pick it up]?" {asked} {NG}. "[This place belongs to all of us|If'
            ' nobody starts, nothing changes]," {said} {NF}.',
            "{NG} [took a bag too|ran to call the others|thought about it and nodded]. {soon} there were {n} helpers. {worked}. They"
            ' filled ten bags, and then they painted a sign: "[Please keep this place clean|Thank you for taking your things'
            ' home|This is home to ducks and frogs]."',
            'In the evening {spot} was [clean|bright|as good as new]. The [duck|bird|frog] came back with its little ones. "[Look,'
            ' they are saying thank you|It was worth it|We did this]," said {NF}. {endday}.',
        ),
        (
            "What was {NF}'s favorite place? It was {spot}.",
            "Who helped {NF}? {AG} and others helped {NF}.",
            "How many bags did they fill? They filled ten bags.",
        ),
        "{NF} and {NG} cleaned up {spot}.",
    ),
    Plot(
        "treasure_map",
        "treasure",
        "xx",
        {
            "chest": (
                "a box of old coins",
                "a jar of marbles",
                "a bag of seeds",
                "a bundle of letters",
                "a tin full of buttons",
                "a note that said: the treasure is your friend",
            ),
            "mark": (
                "the crooked tree",
                "the broken wall",
                "the old well",
                "the round stone",
                "the twin oaks",
            ),
        },
        (
            "{day}, {NF} found a yellow paper {s1}. [It was a map!|There were lines and dots on it.|It was very old.] In one corner"
            " there was a red cross.",
            '{NF} showed it to {AG}. "[A treasure map|This is the way to a treasure|We must follow it]!" said {NG}. They took a'
            ' [spade|lamp|rope] and {food}, and off they went. First they came to {mark}. ["Now twenty steps north," read'
            " {NF}.|The map said to turn left.|An arrow pointed to the hill.]",
            "They [crossed a stream|climbed a hill|crawled under a fence]. [{NG} fell in the mud.|{NF} tore {hisF} sleeve.|It was hot,"
            ' and they were tired.] "[Shall we go back|Is it much farther|Maybe there is no treasure]," said {NG}. "[Only a'
            ' little more|We have come so far|Do not give up now]," said {NF}.',
            "And there was the cross, made of two flat stones! They dug and dug. [Clink, went the spade.|The hole grew deep.|Earth flew"
            " in the air.] {atlast}, they pulled out a [small|dusty|rusty] chest. {NF} opened the lid. Inside was {chest}.",
            'They [looked at each other|began to laugh|sat down in the grass]. "[It is not gold|It is better than gold|What a'
            ' treasure]," said {NF}. "[But the search was the best part|And we found it together|Let us draw a new map for others],"'
            " said {NG}. And that is what they did.",
        ),
        (
            "What did {NF} find? {NF} found a map.",
            "What was in the chest? In the chest was {chest}.",
            "Where did they come first? First they came to {mark}.",
            "Who went with {NF}? {AG} went with {NF}.",
        ),
        "{NF} and {NG} followed a map and found {chest}.",
    ),
)
