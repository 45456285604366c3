"""Plots about fear, practice and rescue. Data only; the grammar is grammar.py's."""

from training.grammar import Plot

PLOTS = (
    Plot(
        "skill",
        "not giving up",
        "cx",
        {
            "sk / fail / ok / did": (
                "ride a bike / fell off / the wheels went round and round / rode",
                "swim / swallowed some water / {hisF} arms and legs moved together / swam",
                "whistle / blew only air / a clear sound came out / whistled",
                "skate / slipped and sat down / {heF} glided over the ice / skated",
                "fly a kite / watched it drop / the wind took the kite up / flew the kite",
                "climb the rope / slid back down / {heF} touched the top / climbed the rope",
                "play the flute / made a squeak / a sweet song came out / played the flute",
                "juggle / dropped every ball / the balls flew in a circle / juggled",
                "walk on stilts / tipped over / {heF} walked like a giant / walked on stilts",
                "row a boat / went in circles / the boat went straight ahead / rowed",
            )
        },
        (
            "{heF:c} wanted to [learn to|know how to] {sk}. [All the others could do it.|{hisF:c} friend {NG} could do it"
            " already.|It looked so easy.]",
            "{day}, {NF} tried for the first time. But {heF} {fail}. [{heF:c} tried again, and {heF} {fail} again.|The second time"
            ' was no better.] "[I will never learn|This is too hard|I cannot do it]," said {NF}.',
            '{hisF:c} {H} [sat down beside {himF}|gave {himF} a hug|smiled]. "[When I was little, I could not do it either|Nobody'
            ' can do it the first day|Every try makes you a bit better]," said {hisF} {H}. "[Try once more tomorrow|Do not give'
            ' up|Take your time]."',
            "So {NF} [practiced|tried] every day for {n} days. [Some days were good, and some days were bad.|{heF:c} was tired, but"
            " {heF} did not stop.|Each day it went a little better.|]",
            '[Then, one morning,|On the last day,|And then, at last,] {ok}. "[Look at me|I can do it|I did it]!" {cried} {NF}. {AG}'
            " [clapped|cheered]. [{NF} was proud.|{NF} smiled from ear to ear.] {heF:c} {did} all the way [home|until dinner].",
        ),
        (
            "What did {NF} want to learn? {NF} wanted to learn to {sk}.",
            "How many days did {NF} practice? {NF} practiced for {n} days.",
            "Who helped {NF}? {hisF:c} {H} helped {NF}.",
            "What happened the first time? The first time, {NF} {fail}.",
        ),
        "{NF} practiced for {n} days and learned to {sk}.",
    ),
    Plot(
        "fear",
        "being brave",
        "xx",
        {
            "fe / ev / tr": (
                "the dark / the lamp went out / the dark was only the night resting its eyes",
                "thunder / the sky went boom / thunder was only clouds clapping their hands",
                "deep water / the water came up to {hisF} knees / the water could hold {himF} up",
                "the big dog next door / the dog ran to the fence / the dog only wanted to play",
                "the tall slide / {heF} looked down from the top / going down was like flying",
                "speaking in class / everyone looked at {himF} / the others were listening"
                " with kind faces",
                "spiders / a spider sat on the wall / the spider was only building its house",
                "the cellar / {heF}"
                " had to fetch potatoes / the cellar was only full of jars and apples",
                "high places / they stood on the bridge / the bridge was strong and did not move",
            )
        },
        (
            "{heF:c} was afraid of {fe}. [{heF:c} did not tell anyone.|Only {hisF} friend {NG} knew.|Just thinking of it made {himF}"
            " shake.]",
            "{day}, {ev}. {NF} [wanted to run away|closed {hisF} eyes|held {hisF} breath]. {hisF:c} heart [went thump, thump,"
            " thump|beat very fast|was as loud as a drum].",
            '{AG} [took {hisF} hand|stood next to {himF}|came close]. "[I was afraid too, once|It is all right to be afraid|Being'
            ' brave means being afraid and trying anyway]," said {NG}. "[Count to three with me|Take one deep breath|Just look, and'
            ' tell me what you see]."',
            "{NF} [counted one, two, three|took a deep breath|opened {hisF} eyes]. [Slowly|Step by step|Little by little], {heF} saw"
            " that {tr}. [It was not so bad.|It was almost nice.] {NF} [began to laugh|smiled|let out a long breath].",
            "After that day, {NF} was not afraid of {fe} anymore. [And when {NG} was afraid of something, {NF} knew just what to"
            ' say.|"Thank you for staying with me," {heF} told {NG}.|{heF:c} felt taller than before.]',
        ),
        (
            "What was {NF} afraid of? {NF} was afraid of {fe}.",
            "Who helped {NF}? {AG} helped {NF}.",
            "What did {NF} find out? {NF} found out that {tr}.",
        ),
        "{NF} was afraid of {fe}, but {NG} helped {himF} to be brave.",
    ),
    Plot(
        "rescue",
        "kindness",
        "xa",
        {
            "st": (
                "stuck in the mud",
                "caught in a net",
                "trapped under a branch",
                "stuck in a hole",
                "tangled in a bush",
                "caught between two stones",
            ),
            "tool": (
                "a long stick",
                "a strong rope",
                "a small spade",
                "a flat board",
                "an old blanket",
            ),
            "where": (
                "in the forest",
                "by the river",
                "across the field",
                "near the lake",
                "along the fence",
            ),
        },
        (
            "{heF:c} was [walking|on the way home|going for a walk] {where} when {heF} heard {soundG}.",
            '{heF:c} looked [around|left and right|everywhere]. There was a [little|small] {KG}, {st}! "[Help|Please help me]!" said'
            ' the {KG}. "My name is {NG}, and I cannot get out."',
            '"[Stay still|Do not be afraid|I will help you]," said {NF}. {heF:c} pulled, but it did not work. {heF:c} thought hard.'
            " Then {heF} [went to get|found] {tool}. With {tool}, {heF} [tried again|pushed and pulled]. One, two, three! {NG} was"
            " free.",
            '"[Thank you|You saved me|I will never forget this]!" said {NG}. "[Come to my home|Let me give you something]." They'
            " went to the {homeG}, and {NG} gave {NF} [some|a bowl of] {eatsG}. [{NF} did not like {eatsG} very much, but {heF} said"
            " thank you.|It was the best thing {NG} had.]",
            "Now {NF} and {NG} [are best friends|meet every week|wave to each other every day]. [And {NF} always keeps {tool} close by,"
            " just in case.|A good turn is never forgotten.|]",
        ),
        (
            "What was wrong with {NG}? {NG} was {st}.",
            "What did {NF} use to help? {NF} used {tool}.",
            "What animal was {NG}? {NG} was {KG:a}.",
            "Where did {NG} live? {NG} lived in the {homeG}.",
        ),
        "{NF} saved {AG}, who was {st}.",
    ),
    Plot(
        "race",
        "not being proud",
        "xx",
        {
            "goal": (
                "the old bridge",
                "the tall pine tree",
                "the red barn",
                "the white gate",
                "the big rock",
                "the mill",
            ),
            "stop": (
                "take a nap",
                "eat some berries",
                "look in a shop window",
                "chase a butterfly",
                "brag to the birds",
                "comb {hisF} hair",
            ),
        },
        (
            '{heF:c} could run very fast, and {heF} [told everyone|said so every day|never stopped saying so]. "[Nobody is faster than'
            ' me|I am the fastest of all]!" said {NF}.',
            '{AG} was slow but [steady|never stopped]. "[Let us race to {goal}|I will race you to {goal}]," said {NG}. [Everyone'
            ' laughed.|{NF} laughed and laughed.] "[Fine|All right]! [This will be easy|I will win for sure]," said {NF}.',
            "Ready, set, go! {NF} ran far ahead. [{heF:c} looked back and could not see {NG}.|{soon} {NG} was only a dot behind {himF}.]"
            ' "I have so much time," {heF} said, and {heF} stopped to {stop}.',
            "{NG} [did not stop|walked on and on]. [Step, step, step.|One foot, then the other foot.] [{heG:c} passed {NF} without a"
            " sound.|When {NF} was not looking, {NG} went by.]",
            'When {NF} [looked up|came running at last], {NG} was already at {goal}. [Everybody cheered.|"You won," said {NF} in a'
            ' small voice.] {NF} [shook {NG}\'s hand|said, "Well done"]. [From then on {heF} bragged a little less.|{heF:c} learned'
            " not to be so proud.]",
        ),
        (
            "Who won the race? {NG} won the race.",
            "Where did the race end? The race ended at {goal}.",
            "Why did {NF} lose? {NF} lost because {heF} stopped to {stop}.",
        ),
        "{NF} raced {NG} to {goal} and lost because {heF} stopped to {stop}.",
    ),
    Plot(
        "bully",
        "standing up for others",
        "cc",
        {"big": ("Rolf", "Gerd", "Mack", "Bart", "Dirk", "Hank")},
        (
            "At {hisF} school there was a big boy called {big}. [{big} was always in a bad mood.|Everyone was a little afraid of"
            " {big}.|{big} pushed the small ones.]",
            '{day}, {big} took {NG}\'s {O} and held it high in the air. "[Jump for it|Come and get it|It is mine now]!" {big} laughed.'
            " {NG} [jumped, but could not reach it|began to cry|asked for it back]. The others [looked away|stood"
            " still|said nothing].",
            "{NF}'s heart beat fast. [{heF:c} was small too.|{heF:c} wanted to run away.|{heF:c} was afraid.] But {heF} walked up to"
            ' {big} and said, "[Stop|That is enough|Give it back]! [That is not funny|You would not like that either|It belongs to'
            ' {NG}]."',
            '{big} [looked surprised|turned red|frowned]. Then another child said, "Yes, give it back." And another. {soon} {n}'
            " children stood behind {NF}. {big} [put the {toy} down|gave the {toy} back|dropped the {toy}] and [walked away|said"
            " nothing].",
            '"{thanks}!" said {NG}. "[I was so scared|So was I|My knees were shaking]," said {NF}. The next day {big} sat alone. {NF}'
            ' [asked him to play|gave him some {food}|sat down beside him]. "[Sorry|I am sorry about the {toy}]," said {big}. [And'
            " after that, he pushed no one.|And then there were three friends.]",
        ),
        (
            "What did {big} take? {big} took {NG}'s {O}.",
            "Who helped {NG}? {NF} helped {NG}.",
            "How many children stood behind {NF}? {n:c} children stood behind {NF}.",
        ),
        "{big} took {NG}'s {O}, and {NF} told him to give it back.",
    ),
    Plot(
        "stage",
        "a show",
        "cx",
        {
            "act / slip": (
                "sing a song / forgot the second line",
                "dance / tripped over a shoe",
                "do a magic trick / dropped all the cards",
                "tell a poem / mixed up the words",
                "play the drum / lost a stick",
                "play the king / lost the paper crown",
            )
        },
        (
            "There was going to be a big show {at}. {NF} wanted to {act}. [{heF:c} practiced in front of the mirror.|{heF:c} practiced"
            " for {n} days.|{heF:c} told everyone about it.]",
            "But on the evening of the show, {NF} looked through the curtain. [So many faces!|Every chair was taken.|Even the teacher"
            ' was there.] {hisF:c} [knees shook|mouth was dry|hands were cold]. "[I cannot go out there|I forgot everything|I want'
            ' to go home]," {heF} said.',
            '{AG} [was next to {himF}|held {hisF} hand|gave {himF} some water]. "[Do not look at all of them, look only at me|They are'
            ' all your friends|Everyone is nervous]," said {NG}. "[I will sit in the first row|Breathe in, breathe out|You know it'
            ' by heart]."',
            "{NF} went out. The light was bright. {heF:c} found {NG}'s face and began to {act}. In the middle {heF} {slip}. [Somebody"
            " laughed.|It was very quiet.|{NF} stopped.] But {NG} [smiled and nodded|gave a sign|clapped], and {NF} [went on|began"
            " again|laughed too].",
            'At the end everybody [clapped and clapped|stood up|cheered]. "[You were wonderful|I knew you could do it|Nobody minded the'
            ' mistake]," said {NG}. "[May I do it again next year|It was not so bad|I looked only at you]," said {NF}.',
        ),
        (
            "What did {NF} want to do in the show? {NF} wanted to {act}.",
            "What went wrong? {NF} {slip}.",
            "Who helped {NF} to be brave? {AG} helped {NF}.",
        ),
        "{NF} was nervous before the show, but {NG} helped {himF}.",
    ),
    Plot(
        "fire_watch",
        "quick thinking",
        "xx",
        {
            "danger / act": (
                "the hay was burning / rang the big bell",
                "the bridge was broken / waved {hisF} {col} scarf at the train",
                "the river was rising / beat on a drum",
                "smoke came out of the bakery / called as loud as {heF} could",
                "the dam had a hole / put {hisF} arm in the hole",
                "the boat had no anchor / threw a rope to the fishermen",
            )
        },
        (
            '{heF:c} was small, and nobody [listened to {himF}|asked {himF} to help|thought {heF} could do much]. "[You are too'
            ' little|Wait until you are bigger|Go and play]," they always said.',
            "{day}, {NF} was [coming home|out walking|playing alone] when {heF} saw that {danger}. [Nobody else was there.|There was no"
            " time to lose.|Everyone was asleep.] {NF}'s heart beat fast.",
            "{heF:c} did not run away. {heF:c} {act}. [Again and again {heF} did it.|{heF:c} did not stop.|{hisF:c} arms"
            ' hurt.] {atlast}, {AG} heard it and came running. "[What is it|What is wrong|What has happened]?" {cried} {NG}.',
            '"Look, {danger}!" said {NF}. {NG} [called the others|ran for help|woke the whole village]. {soon} {many} people came'
            " with buckets and ropes. {worked}. Before the sun [set|came up], everything was safe.",
            '"[Who saw it first|Who saved us|Who was so quick]?" asked the mayor. "{NF} did," said {NG}. They [gave {himF} a'
            " medal|carried {himF} on their shoulders|gave three cheers for {himF}]. After that, nobody said that {NF} was too little.",
        ),
        (
            "What did {NF} see? {NF} saw that {danger}.",
            "What did {NF} do? {NF} {act}.",
            "Who heard {NF}? {AG} heard {NF}.",
        ),
        "{NF} saw that {danger} and {act}.",
    ),
    Plot(
        "lost_market",
        "asking for help",
        "cx",
        {
            "hold": (
                "the honey stand",
                "the man with the balloons",
                "a puppet show",
                "a cage of white doves",
                "a juggler",
                "a stand with wooden toys",
            )
        },
        (
            "{day}, {NF} went to the market with {hisF} {H}. [There were so many people.|It was loud and full of colors.|Everything"
            ' smelled of {food}.] "Hold my hand," said {hisF} {H}.',
            "But {NF} saw {hold}. [{heF:c} only wanted to look for a moment.|{heF:c} let go of the hand.|{heF:c} forgot everything else.]"
            " When {heF} turned around, {hisF} {H} was gone! {heF:c} saw only [legs and coats|strangers|baskets and backs].",
            "{NF} wanted to cry. [{heF:c} ran left, then right.|{heF:c} called, but nobody heard.] Then {heF} remembered: if you are lost,"
            ' [stay where you are|stand still and ask someone kind]. {AG} was standing {s1}. "[Excuse me|Please help me], I am lost,"'
            " said {NF}.",
            '"{comfort}," said {NG}. "[What is your name|Who did you come with|Tell me what {heH} looks like]?" "My {H} has {col:a}'
            ' coat," said {NF}. {NG} [climbed on a box|looked over the heads|called in a loud voice]. "[I see {col:a} coat|There,'
            ' over there]!"',
            '{hisF:c} {H} came running and [took {himF} in {hisH} arms|hugged {himF} tight]. "[I looked everywhere|I am so glad|You did'
            ' the right thing]!" {heH} said. "{thanks}," they told {NG}. And {NF} held {hisH} hand all the way home.',
        ),
        (
            "What did {NF} look at? {NF} looked at {hold}.",
            "What color was the coat? The coat was {col}.",
            "Who helped {NF}? {AG} helped {NF}.",
            "Where was {NG} standing? {NG} was standing {s1}.",
        ),
        "{NF} was lost at the market, and {NG} helped {himF} find {hisF} {H}.",
    ),
)
